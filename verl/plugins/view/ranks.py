"""Activity of each rank in a step, from the file that the tracker ``file`` writes beside its metrics."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

from verl.plugins.view.timeline import RankCall, Span, StepSpans

MAX_STEPS = 40
"""Steps over which busy time and waits are summed."""
STEP = re.compile(rb'"step": (\d+)')
HEAD_BYTES = 200
"""The step stands in the beginning of a line."""

Interval = tuple[float, float]


class Lane(TypedDict):
    """The calls of a rank in a step, in the order of their begins."""

    rank: str
    calls: list[RankCall]


class RankTotals(TypedDict):
    """Means of a rank over steps."""

    rank: str
    busy: float
    """Seconds per step."""
    waits: dict[str, float]
    """Seconds per step, by stage."""
    rss_mb: float
    """Most at the end of a call."""
    device_mb: float | None
    """Likewise; None without a GPU."""


class RanksSummary(TypedDict):
    """Means over steps, of all ranks."""

    steps: int
    """Number of steps that were read."""
    ranks: list[RankTotals]


class RanksFile:
    """The lines of steps in a file of ranks' calls, found as they are asked for; a repeated step has its last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[int, tuple[int, int]] = {}
        self._read = 0
        self._lock = threading.Lock()  # requests are answered by several threads

    def steps(self, first: int | None, last: int | None) -> list[int]:
        """Return the numbers of the recorded steps from ``first`` to ``last``, in order."""
        with self._lock:
            self._look()
            steps = sorted(self._places)
        return [step for step in steps if (first is None or step >= first) and (last is None or step <= last)]

    def calls(self, step: int) -> list[RankCall]:
        """Return the calls of a step; empty for a step that is not there, or whose line is broken."""
        with self._lock:
            position = self._places.get(step)
        if position is None:
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(position[0])
                line = json.loads(file.read(position[1]))
            return [
                {
                    "rank": line["ranks"][rank], "name": line["calls"][name], "begin": line["began"] + begin / 1e3,
                    "seconds": lasted / 1e3, "rss_mb": rss_mb, "device_mb": device_mb,
                }
                for rank, name, begin, lasted, rss_mb, device_mb in line["rows"]
            ]  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
            return []

    def _look(self) -> None:
        try:
            if self.path.stat().st_size < self._read:  # cut or replaced
                self._places, self._read = {}, 0
            with self.path.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    if step := STEP.search(line[:HEAD_BYTES]):
                        self._places[int(step[1])] = (self._read, len(line))
                    self._read += len(line)
        except FileNotFoundError:
            self._places, self._read = {}, 0


def lanes_of(calls: Iterable[RankCall], begin: float, end: float) -> list[Lane]:
    """Return the calls of a step rank by rank, cut to the step: calls between two steps belong to neither."""
    lanes: dict[str, list[RankCall]] = {}
    for call in calls:  # rank by rank, as the file has them
        lane = lanes.setdefault(call["rank"], [])
        first, last = max(call["begin"], begin), min(call["begin"] + call["seconds"], end)
        if last > first:
            lane.append({**call, "begin": first, "seconds": last - first})
    return [{"rank": rank, "calls": sorted(lane, key=lambda call: call["begin"])} for rank, lane in lanes.items()]


def waits_of(lane: Sequence[RankCall], stages: Sequence[Span]) -> dict[str, float]:
    """Return for how many seconds of each stage a rank answered no call; a stage within another has its own time.

    Args:
        lane: calls of the rank in one step.
        stages: of the step, as of ``spans_of``.
    """
    busy = [(call["begin"], call["begin"] + call["seconds"]) for call in lane]
    spans = [(stage["name"], stage["depth"], stage["begin"], stage["begin"] + stage["seconds"]) for stage in stages]
    edges = sorted(
        {edge for _, _, begin, end in spans for edge in (begin, end)} | {edge for interval in busy for edge in interval}
    )
    waits: dict[str, float] = {}
    for begin, end in pairwise(edges):
        if any(first <= begin and end <= last for first, last in busy):
            continue
        around = [(depth, name) for name, depth, first, last in spans if first <= begin and end <= last]
        if around:
            _, name = max(around)
            waits[name] = waits.get(name, 0.0) + end - begin
    return waits


def summary_of(file: RanksFile, steps: Sequence[StepSpans], recorded: Sequence[int]) -> RanksSummary:
    """Return means over the newest recorded steps of ``steps``.

    Args:
        file: of the calls.
        steps: stages, as of ``spans_of``.
        recorded: steps that the file has.
    """
    has_calls = set(recorded)
    measured = [step for step in steps if step["step"] in has_calls and step["spans"]][-MAX_STEPS:]
    ranks: dict[str, RankTotals] = {}
    for step in measured:
        begin, end = bounds_of(step["spans"])
        for lane in lanes_of(file.calls(step["step"]), begin, end):
            totals = ranks.setdefault(
                lane["rank"], {"rank": lane["rank"], "busy": 0.0, "waits": {}, "rss_mb": 0, "device_mb": None}
            )
            waits = waits_of(lane["calls"], step["spans"])
            totals["busy"] += (end - begin - sum(waits.values())) / len(measured)
            for name, seconds in waits.items():
                totals["waits"][name] = totals["waits"].get(name, 0.0) + seconds / len(measured)
            for call in lane["calls"]:
                totals["rss_mb"] = max(totals["rss_mb"], call["rss_mb"])
                if call["device_mb"] is not None:
                    totals["device_mb"] = max(totals["device_mb"] or 0, call["device_mb"])
    return {"steps": len(measured), "ranks": list(ranks.values())}


def bounds_of(spans: Sequence[Span]) -> Interval:
    """Return begin and end of a step."""
    return min(span["begin"] for span in spans), max(span["begin"] + span["seconds"] for span in spans)
