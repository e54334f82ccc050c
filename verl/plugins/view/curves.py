"""Metrics of runs as arrays: from the index, and from the lines that were written since."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl.plugins.view.index import Index

CHUNK = 1000
"""Lines of a chunk of the index."""
ABSENT = math.inf
"""Value in a chunk of a metric that its line lacks; NaN is one that was not finite."""
FINGERPRINT_BYTES = 256
"""Bytes before the end of what was read; others there say that the file was cut or replaced."""


@dataclass(frozen=True)
class Curve:
    """A metric over steps; of several runs their mean.

    Args:
        steps: (points,).
        times: (points,) in seconds since 1970; NaN where they are not known, and of means.
        values: (points,); NaN for a value that was not finite.
        low: (points,) the lowest of the runs; None of one run.
        high: (points,) the highest of the runs.
        runs: how many.
    """

    steps: np.ndarray
    times: np.ndarray
    values: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    runs: int = 1


class MetricsFile:
    """The metrics of one run, read as far as they are written.

    Args:
        run: id of the run.
        path: file of the tracker ``file``.
    """

    def __init__(self, run: str, path: Path) -> None:
        self.run = run
        self.path = path
        self.last_step: int | None = None
        self.last_time: float | None = None
        self.latest: dict[str, float] = {}
        """The newest finite value of each metric."""
        self._is_known = False
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._chunk_end = 0
        self._chunks = 0
        self._fingerprint = ""
        self._tail: list[tuple[int, float, dict[str, float]]] = []
        self.names: set[str] = set()
        self.latest = {}

    def forget(self) -> None:
        """Read the file and the index from their beginnings at the next :meth:`refresh`."""
        self._is_known = False
        self._forget()

    def refresh(self, index: Index) -> bool:
        """Read what was written since the last call; return whether anything was."""
        if not self._is_known:
            self._take_over(index)
        try:
            size = self.path.stat().st_size
            if size < self._offset or self._fingerprint != _fingerprint(self.path, self._offset):
                self._forget()
                with index.writing() as database:
                    for table in ("metrics_file", "chunk", "series"):
                        database.execute(f"DELETE FROM {table} WHERE run = ?", (self.run,))
            if size == self._offset:
                return False
            with self.path.open("rb") as file:
                file.seek(self._offset)
                lines = file.readlines()
        except OSError:
            return False
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._take(line)
            if len(self._tail) >= CHUNK:
                self._store(index)
        self._fingerprint = _fingerprint(self.path, self._offset)
        return True

    def series(self, index: Index, names: Sequence[str]) -> dict[str, Curve]:
        """Return the curves of metrics, each without the steps that lack it."""
        parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {name: [] for name in names}
        with index.reading() as database:
            for name in names:
                query = (
                    "SELECT steps, times, numbers FROM series JOIN chunk USING (run, number) "
                    "WHERE run = ? AND name = ? AND number < ? ORDER BY number"  # another view may have stored more
                )
                for steps, times, numbers in database.execute(query, (self.run, name, self._chunks)):
                    parts[name].append(tuple(np.frombuffer(part) for part in (steps, times, numbers)))  # type: ignore
        tail = list(self._tail)
        for name in names:
            rows = [(step, time, data[name]) for step, time, data in tail if name in data]
            if rows:
                parts[name].append(tuple(np.array(column, dtype=float) for column in zip(*rows, strict=True)))  # type: ignore
        return {name: _joined(points) for name, points in parts.items()}

    def _take(self, line: bytes) -> None:
        self._offset += len(line)
        try:
            record = json.loads(line)
            step, data = int(record["step"]), record["data"]
            numbers = {name: _number(value) for name, value in data.items() if isinstance(value, int | float | None)}
            time = float(record.get("time", math.nan))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return
        self._tail.append((step, time, numbers))
        self.names.update(numbers)
        self.latest |= {name: value for name, value in numbers.items() if math.isfinite(value)}
        self.last_step = step
        self.last_time = time if time == time else self.last_time

    def _take_over(self, index: Index) -> None:
        """Begin after the chunks that the index has of this file."""
        self._is_known = True
        with index.reading() as database:
            row = database.execute(
                "SELECT chunks, offset, fingerprint FROM metrics_file WHERE run = ?", (self.run,)
            ).fetchone()
            if row is None:
                return
            self._chunks, self._offset, self._fingerprint = row
            self._chunk_end = self._offset
            query = "SELECT name, numbers FROM series WHERE run = ? AND number = ?"
            for name, numbers in database.execute(query, (self.run, self._chunks - 1)):
                values = np.frombuffer(numbers)
                finite = values[np.isfinite(values)]
                if len(finite):
                    self.latest[name] = float(finite[-1])
            names = database.execute("SELECT DISTINCT name FROM series WHERE run = ?", (self.run,))
            self.names = {name for (name,) in names}
            steps, times = database.execute(
                "SELECT steps, times FROM chunk WHERE run = ? AND number = ?", (self.run, self._chunks - 1)
            ).fetchone()
            self.last_step = int(np.frombuffer(steps)[-1])
            self.last_time = float(np.frombuffer(times)[-1])

    def _store(self, index: Index) -> None:
        """Move the lines read so far from memory to a chunk of the index."""
        steps = np.array([step for step, _, _ in self._tail], dtype=float)
        times = np.array([time for _, time, _ in self._tail], dtype=float)
        names = sorted({name for _, _, data in self._tail for name in data})
        with index.writing() as database:
            key = (self.run, self._chunks)
            database.execute(
                "INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?)", (*key, steps.tobytes(), times.tobytes())
            )
            columns = {
                name: np.array([data.get(name, ABSENT) for _, _, data in self._tail], dtype=float) for name in names
            }
            rows = [(self.run, name, self._chunks, column.tobytes()) for name, column in columns.items()]
            database.executemany("INSERT OR REPLACE INTO series VALUES (?, ?, ?, ?)", rows)
            self._chunks += 1
            fingerprint = _fingerprint(self.path, self._offset)
            database.execute(
                "INSERT OR REPLACE INTO metrics_file VALUES (?, ?, ?, ?)",
                (self.run, self._chunks, self._offset, fingerprint),
            )
        self._chunk_end = self._offset
        self._tail = []


def thinned(curve: Curve, points: int) -> dict[str, list[float | None] | int]:
    """Return a curve for a page, of at most about ``points`` points."""
    rows = extremes(curve.values, points)
    columns = {"steps": curve.steps, "times": curve.times, "values": curve.values, "low": curve.low, "high": curve.high}
    return {name: _plain(column[rows]) for name, column in columns.items() if column is not None} | {"runs": curve.runs}


def extremes(numbers: np.ndarray, points: int) -> np.ndarray:
    """Return the rows by which a curve keeps its look: both ends, and of each interval the lowest, the highest and the
    first that is not finite.
    """
    if len(numbers) <= max(2, points):
        return np.arange(len(numbers))
    width = math.ceil(2 * len(numbers) / max(2, points))
    parts = np.pad(numbers, (0, -len(numbers) % width), constant_values=math.nan).reshape(-1, width)
    finite = np.isfinite(parts)
    has_finite = np.flatnonzero(finite.any(1))
    lowest = np.where(finite, parts, math.inf).argmin(1)
    highest = np.where(finite, parts, -math.inf).argmax(1)
    ends = [0, len(numbers) - 1]
    gaps = np.flatnonzero(~np.isfinite(numbers))
    gaps = gaps[np.unique(gaps // width, return_index=True)[1]]
    return np.unique(
        np.concatenate([ends, has_finite * width + lowest[has_finite], has_finite * width + highest[has_finite], gaps])
    )


def _number(value: float | None) -> float:
    """Read a value of a line; null stands for one that was not finite, which older files have as it was."""
    return math.nan if value is None or not math.isfinite(value) else float(value)


def _plain(numbers: np.ndarray) -> list[float | None]:
    """JSON has no NaN: a value that is not finite becomes null."""
    return [value if math.isfinite(value) else None for value in numbers.tolist()]


def _joined(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Curve:
    if not parts:
        return Curve(np.empty(0), np.empty(0), np.empty(0))
    steps, times, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    there = values != ABSENT
    return Curve(steps[there], times[there], values[there])


def _fingerprint(path: Path, offset: int) -> str:
    """A hash of the bytes before an offset."""
    if offset == 0:
        return ""
    with path.open("rb") as file:
        file.seek(max(0, offset - FINGERPRINT_BYTES))
        before = file.read(min(offset, FINGERPRINT_BYTES))
    return hashlib.blake2s(before, digest_size=8).hexdigest()
