"""Facts about a run for the page: its state, starts, checkpoints, settings and alerts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from verl.base.nested import flat
from verl.plugins.view.curves import Curve, MetricsFile
from verl.plugins.view.discovery import FoundFiles, RunFiles, began, find_runs, read_events
from verl.plugins.view.index import Index, places_of_runs
from verl.plugins.view.ranks import RanksFile
from verl.plugins.view.samples import kinds_of_samples, refresh_samples, why_no_samples
from verl.trainer.health import DESCRIPTIONS, Alert, HealthWatch, health_metrics
from verl.utils.run_log import clock

if TYPE_CHECKING:
    from verl.base.types import JsonMapping, JsonObject
    from verl.plugins.view.timeline import Mark

SILENT_S = 600.0
"""Seconds without a line after which a run elsewhere, or without events, counts as lost."""
SEARCH_S = 3.0
"""Seconds between two searches of the folders for new runs."""


class Run:
    """One run, with what was read of its files so far."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.metrics = MetricsFile(files.id, files.metrics)
        self.ranks = RanksFile(files.ranks)
        self.events: list[dict[str, object]] = []
        self._events_stat: tuple[int, int] | None = None

    def refresh(self, index: Index) -> bool:
        """Read what was written since the last call; return whether anything was."""
        changed = self.metrics.refresh(index)
        try:
            stat = self.files.events.stat()
        except OSError:
            return changed
        if self._events_stat != (stat.st_size, stat.st_mtime_ns):
            self._events_stat = (stat.st_size, stat.st_mtime_ns)
            self.events = read_events(self.files.events)
            changed = True
        return changed

    @property
    def starts(self) -> list[JsonObject]:
        """Events of starts, in order."""
        return [event for event in self.events if event["event"] == "start"]

    def config(self) -> dict[str, object]:
        """Settings of the last start, by dotted key."""
        config = self.starts[-1].get("config") if self.starts else None
        return dict(flat(config)) if isinstance(config, Mapping) else {}

    def summary(self, kinds: Sequence[str], position: int) -> dict[str, object]:
        """Return what the list of runs shows.

        Args:
            kinds: of samples that the run has.
            position: number by which it has its colour.
        """
        main = main_metrics(self.metrics.latest)[:1]
        state = state_of(self.events, self._changed_at())
        restarts = self.metrics.latest.get("recovery/restarts", 0) + max(0, len(self.starts) - 1)
        return {
            "id": self.files.id,
            "name": self.files.name,
            "path": str(self.files.metrics),
            "state": state,
            "recovered": bool(restarts) and state in ("running", "done"),
            "step": self.metrics.last_step,
            "changed": self._changed_at(),
            "latest": {name: self.metrics.latest[name] for name in main},
            "kinds": list(kinds),
            "no_samples": "" if kinds else why_no_samples(self.files),
            "place": position,
        }

    def details(self) -> dict[str, object]:
        """Return what the page of one run shows, beside its summary."""
        last = self.starts[-1] if self.starts else {}
        return {
            "id": self.files.id,
            "metrics": sorted(self.metrics.names),
            "main": main_metrics(self.metrics.names),
            "config": self.config(),
            "environment": last.get("environment", {}),
            "command": last.get("command", ""),
            "host": last.get("host", ""),
            "marks": marks_of(self.events),
            "ends": [event for event in self.events if event["event"] == "end"],
        }

    def alerts(self, index: Index) -> Sequence[Mapping[str, object]]:
        """Return the alerts of all steps, newest first."""
        names = {name for metrics in health_metrics(self.metrics.names).values() for name in metrics}
        alerts = alerts_of(self.metrics.series(index, sorted(names)))
        return [asdict(alert) | {"title": DESCRIPTIONS[alert.rule][0]} for alert in alerts][::-1]

    def rules(self) -> list[dict[str, object]]:
        """Return the rules of health, each with the metrics of the run that it tests."""
        return [
            {"title": DESCRIPTIONS[rule][0], "condition": DESCRIPTIONS[rule][1], "metrics": names}
            for rule, names in health_metrics(self.metrics.names).items()
        ]

    def _changed_at(self) -> float:
        for file in (self.files.metrics, self.files.events):  # before its first step a run may have the second only
            try:
                return file.stat().st_mtime
            except OSError:
                continue
        return 0.0


MAIN_METRICS = (
    "critic/score/mean", "critic/rewards/mean",
    "val-core/", "val/accuracy", "val/loss",
    "response_length/mean", "response_length/clip_ratio",
    "actor/entropy",
    "actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl",
    "actor/grad_norm", "critic/grad_norm", "train/grad_norm",
    "actor/pg_loss", "critic/vf_loss", "train/loss",
    "timing_s/step", "perf/throughput",
)  # fmt: skip
"""Metrics that a page and a report show first: reward, validation, length, entropy, KL, gradient, loss, time.

One that ends with a slash stands for all that begin with it.
"""


def main_metrics(names: Iterable[str]) -> list[str]:
    """Return those of the metrics that are shown first, in the order of :data:`MAIN_METRICS`."""
    ordered = sorted(names)
    return [
        name
        for main in MAIN_METRICS
        for name in ordered
        if name == main or (main.endswith("/") and name.startswith(main))
    ]


def state_of(events: Sequence[Mapping[str, object]], changed: float) -> str:
    """Return ``running``, ``done``, ``stopped``, ``failed`` or ``lost`` (its process is gone without a word).

    Of a run on another machine, or without events, only its silence tells.
    """
    last = next((event for event in reversed(events) if event["event"] in ("start", "end")), None)
    if last is not None and last["event"] == "end":
        return str(last.get("status", "done"))
    if last is not None and last.get("host") == socket.gethostname():
        return "running" if _lives(last) else "lost"
    return "running" if clock() - changed < SILENT_S else "lost" if last else "done"


def _lives(start: JsonMapping) -> bool:
    try:
        return abs(psutil.Process(start["pid"]).create_time() - start["process_began"]) < 2
    except (psutil.Error, KeyError, TypeError):
        return False


def marks_of(events: Iterable[JsonMapping]) -> list[Mark]:
    """Return resumptions and checkpoints."""
    kinds = {"resume": "resumed", "checkpoint": "checkpoint"}
    return [
        {"kind": kinds[event["event"]], "step": event.get("step"), "time": event.get("time")}
        for event in events
        if event["event"] in kinds
    ]


def alerts_of(curves: Mapping[str, Curve]) -> list[Alert]:
    """Run the rules of health over whole curves, step by step."""
    by_step: dict[int, dict[str, float]] = {}
    for name, curve in curves.items():
        for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
            by_step.setdefault(int(step), {})[name] = value
    watch = HealthWatch()
    return [alert for step in sorted(by_step) for alert in watch.check(step, by_step[step])]


class Library:
    """The runs below folders, kept up to date.

    Args:
        folders: to look into; a file is the metrics of a run itself.
        index: the index, which one thread writes: the one that calls :meth:`refresh`.
    """

    def __init__(self, folders: Sequence[Path], index: Index) -> None:
        self.folders = list(folders)
        self.index = index
        self.runs: dict[str, Run] = {}
        self.is_indexing = True
        """True if samples are being added to the index, or will be."""
        self._files = FoundFiles([], [])
        self._searched = 0.0
        self._lock = threading.Lock()

    def find(self) -> None:
        """Look for new runs."""
        self._files = find_runs(self.folders)
        files_by_id = {files.id: files for files in self._files.runs}
        with self._lock:
            for key, files in files_by_id.items():
                run = self.runs.get(key)
                if run is None:
                    self.runs[key] = Run(files)
                else:
                    run.files = files
            for key in self.runs.keys() - files_by_id.keys():
                del self.runs[key]
        self._searched = time.monotonic()

    def refresh(self) -> list[str]:
        """Read what was written since the last call; return the ids of runs with news."""
        if time.monotonic() - self._searched > SEARCH_S:
            self.find()
        runs = list(self.runs.values())
        if self.index.make():  # somebody deleted it
            for run in runs:
                run.metrics.forget()
        changed = {run.files.id for run in runs if run.refresh(self.index)}
        return sorted(changed)

    def refresh_samples(self) -> list[str]:
        """Add new samples to the index; return the ids of runs with news."""
        self.is_indexing = True
        try:
            return refresh_samples(self.index, self._files)
        finally:
            self.is_indexing = False

    def summaries(self) -> dict[str, dict[str, Any]]:
        """Return :meth:`Run.summary` of all runs by id."""
        runs = list(self.runs.values())
        kinds = kinds_of_samples(self.index)
        first = {run.files.id: began(run.starts[0]) if run.starts else 0.0 for run in runs}
        places = places_of_runs(self.index, sorted(first, key=lambda run: (first[run], run)))
        return {run.files.id: run.summary(kinds.get(run.files.id, []), places[run.files.id]) for run in runs}
