"""The stages of steps on a line of time, for the page and as a trace that Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MOST_STEPS = 200


def spans_of(events: Iterable[Mapping[str, Any]], first: int | None, last: int | None) -> list[dict[str, Any]]:
    """Return the stages of steps ``first`` to ``last``, of the newest ``MOST_STEPS`` of them.

    Returns:
        for each step ``step`` and ``spans``: {name, begin, seconds, depth}; a stage within another is deeper.
    """
    steps = {
        event["step"]: event["spans"]
        for event in events
        if event["event"] == "step"
        and (first is None or event["step"] >= first)
        and (last is None or event["step"] <= last)
    }
    return [{"step": step, "spans": _nested(steps[step])} for step in sorted(steps)[-MOST_STEPS:]]


def _nested(spans: Iterable[tuple[str, float, float]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    open_until: list[float] = []
    for name, begin, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        found.append({"name": name, "begin": begin, "seconds": end - begin, "depth": len(open_until)})
        open_until.append(end)
    return found


def chrome_trace(name: str, steps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return stages as a trace of complete events (``ph: X``), in microseconds since 1970."""
    process = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"verl {name}"}}
    events = [
        {
            "name": span["name"], "cat": "stage", "ph": "X", "pid": 1, "tid": 1, "ts": round(span["begin"] * 1e6),
            "dur": round(span["seconds"] * 1e6), "args": {"step": step["step"]},
        }
        for step in steps
        for span in step["spans"]
    ]  # fmt: skip
    return {"traceEvents": [process, *events], "displayTimeUnit": "ms"}
