"""The stages of steps on a line of time, for the page and as a trace that Perfetto and chrome://tracing read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypedDict

from verl.base.types import JsonMapping
from verl.utils.run_log import ENGINES

RawSpan: TypeAlias = tuple[str, float, float]
"""Name, begin and end of a stage, as the file of a run has it."""
MAX_STEPS = 200  # bounds one answer to the page, whatever steps it asks for


class Span(TypedDict):
    """A stage of a step; a stage within another is deeper. Times are seconds, ``begin`` since 1970."""

    name: str
    begin: float
    seconds: float
    depth: int


class StepSpans(TypedDict):
    """The stages of a step, in the order of their begins."""

    step: int
    spans: list[Span]
    beside: list[Span]
    """Spans of engines with a pool of their own in the same time, cut to the step."""


class RankCall(TypedDict):
    """A call that a rank answered. Times are seconds, ``begin`` since 1970."""

    rank: str
    name: str
    begin: float
    seconds: float
    rss_mb: float
    device_mb: float | None
    """None without a GPU."""


class Mark(TypedDict):
    """A resumption (``resumed``) or a checkpoint."""

    kind: str
    step: int | None
    time: float | None


def spans_of(events: Iterable[JsonMapping], first: int | None, last: int | None) -> list[StepSpans]:
    """Return the stages of steps ``first`` to ``last``, of the newest ``MAX_STEPS`` of them."""
    recorded = {
        event["step"]: event["spans"]
        for event in events
        if event["event"] == "step" and (first is None or event["step"] >= first)
    }
    steps: list[StepSpans] = []
    for step in sorted(step for step in recorded if last is None or step <= last)[-MAX_STEPS:]:
        stages, beside = _split(recorded[step])
        begin, end = min((span[1] for span in stages), default=0.0), max((span[2] for span in stages), default=0.0)
        # The step that waits for what was sampled in the background records it: often the next one.
        beside += _split(recorded.get(step + 1, []))[1]
        cut = [
            (name, max(first, begin), min(last, end)) for name, first, last in beside if first < end and last > begin
        ]
        steps.append({"step": step, "spans": _nested(stages), "beside": _nested(cut)})
    return steps


def _split(spans: Sequence[RawSpan]) -> tuple[list[RawSpan], list[RawSpan]]:
    """Return the stages of a step, and what went on beside them or before the step, in the background."""
    begin = min((begin for name, begin, _ in spans if name == "step"), default=-math.inf)
    stages, beside = [], []
    for span in spans:
        (beside if span[0] == ENGINES or span[1] < begin else stages).append(span)
    return stages, beside


def _nested(spans: Iterable[RawSpan]) -> list[Span]:
    nested: list[Span] = []
    open_until: list[float] = []
    for name, begin, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        nested.append({"name": name, "begin": begin, "seconds": end - begin, "depth": len(open_until)})
        open_until.append(end)
    return nested


def chrome_trace(
    name: str,
    steps: Iterable[StepSpans],
    calls: Iterable[tuple[int, RankCall]] = (),
    marks: Iterable[Mark] = (),
) -> dict[str, object]:
    """Return stages, and the calls of ranks, as a trace of complete events (``ph: X``), in microseconds since 1970.

    The driver is process 1 and the ranks are those after it, each with the memory it held after its calls as counters.

    Args:
        name: of the run.
        steps: stages, as of :func:`spans_of`.
        calls: step and call, as of ``RanksFile.calls``.
        marks: resumptions and checkpoints, as of ``marks_of``; they become instant events of the driver.
    """
    events = [_process(1, f"verl {name}: driver")]
    for step in steps:
        events += [_complete(span, 1, "stage", step["step"]) for span in step["spans"]]
        events += [_complete(span, 1, "sampling", step["step"]) | {"tid": 2} for span in step["beside"]]
    events += [
        {"name": f"{mark['kind']}, step {mark['step']}", "ph": "i", "s": "g", "pid": 1, "tid": 1, "ts": round(at * 1e6)}
        for mark in marks
        if (at := mark["time"]) is not None
    ]
    numbers: dict[str, int] = {}
    for step, call in calls:
        if call["rank"] not in numbers:
            numbers[call["rank"]] = len(numbers) + 2
            events.append(_process(numbers[call["rank"]], call["rank"]))
        pid = numbers[call["rank"]]
        events.append(_complete(call, pid, "call", step))
        memory = {"resident": call["rss_mb"]} | ({} if call["device_mb"] is None else {"GPU": call["device_mb"]})
        end = round((call["begin"] + call["seconds"]) * 1e6)
        events.append({"name": "memory (MiB)", "ph": "C", "pid": pid, "ts": end, "args": memory})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(pid: int, name: str) -> dict[str, object]:
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def _complete(span: Span | RankCall, pid: int, category: str, step: int) -> dict[str, object]:
    return {
        "name": span["name"], "cat": category, "ph": "X", "pid": pid, "tid": 1, "ts": round(span["begin"] * 1e6),
        "dur": round(span["seconds"] * 1e6), "args": {"step": step},
    }  # fmt: skip
