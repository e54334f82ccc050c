"""Runs beside each other: those that differ in seeds alone, averages over them, best values, and all of it as CSV."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verl.plugins.view.curves import Curve
from verl.plugins.view.index import Index
from verl.plugins.view.runs import Run

NAMING = ("project_name", "experiment_name", "default_local_dir", "rollout_data_dir", "validation_data_dir", "logger")
"""Settings that name a run, or say where it writes: runs that differ in these and in seeds are the same experiment."""


@dataclass(frozen=True)
class Best:
    """The lowest, highest and last finite value of a curve, each with its step."""

    lowest: tuple[float, float]
    highest: tuple[float, float]
    last: tuple[float, float]
    runs: int
    """Over how many runs the curve is a mean."""


def experiment_of(run: Run) -> str:
    """Return a key that runs share whose settings differ in seeds and in :data:`NAMING` alone.

    A run whose settings were not recorded shares it with no other.
    """
    config = run.config()
    if not config:
        return run.files.id
    same = {key: value for key, value in config.items() if not _is_of_one_run(key)}
    text = json.dumps(same, sort_keys=True, default=str)
    return hashlib.blake2s(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def _is_of_one_run(key: str) -> bool:
    last = key.rpartition(".")[2]
    return last in NAMING or last == "seed" or last.endswith("_seed")


def curves_of(
    runs: Sequence[Run], names: Sequence[str], index: Index, averages: bool = False
) -> dict[str, dict[str, Curve]]:
    """Return the curves of metrics by run, or with ``averages`` by :func:`experiment_of`.

    Metrics that a run lacks are left out. The mean of several runs is over the steps that all of them have; of a step
    that a run made twice the later counts.
    """
    by_run = {
        run.files.id: run.metrics.series(index, [name for name in names if name in run.metrics.names]) for run in runs
    }
    if not averages:
        return by_run
    experiments: dict[str, list[dict[str, Curve]]] = {}
    for run in runs:
        experiments.setdefault(experiment_of(run), []).append(by_run[run.files.id])
    return {
        key: {
            name: mean_curve([curves[name] for curves in members if name in curves])
            for name in names
            if any(name in curves for curves in members)
        }
        for key, members in experiments.items()
    }


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean over the steps that all curves have, with the lowest and the highest of each step."""
    if len(curves) == 1:
        return curves[0]
    by_step = [dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) for curve in curves]
    steps = functools.reduce(np.intersect1d, [np.array(list(values)) for values in by_step])
    table = np.array([[values[step] for step in steps.tolist()] for values in by_step]).reshape(len(curves), -1)
    with np.errstate(invalid="ignore"):  # infinities of both signs have no mean
        return Curve(steps, np.full(len(steps), np.nan), table.mean(0), table.min(0), table.max(0), len(curves))


def best_of(curve: Curve) -> Best | None:
    """Return the best values of a curve; None if it has no finite one."""
    finite = np.isfinite(curve.values)
    steps, values = curve.steps[finite], curve.values[finite]
    if not len(steps):
        return None
    places = int(values.argmin()), int(values.argmax()), len(values) - 1
    lowest, highest, last = ((float(steps[index]), float(values[index])) for index in places)
    return Best(lowest, highest, last, curve.runs)


def csv_of(runs: Sequence[Run], names: Sequence[str], index: Index) -> Iterator[str]:
    """Yield lines of CSV: a line per run and step, with the name of the run, the step, the time and each metric.

    A metric that a step lacks is empty, one that was not finite is ``nan``; of a step that a run made twice the later
    counts.
    """
    yield _line(["run", "step", "time", *names])
    for run in runs:
        times: dict[float, float] = {}
        rows: dict[float, dict[str, float]] = {}
        for name, curve in curves_of([run], names, index)[run.files.id].items():
            columns = (column.tolist() for column in (curve.steps, curve.times, curve.values))
            for step, time, value in zip(*columns, strict=True):
                times[step] = time
                rows.setdefault(step, {})[name] = value
        for step in sorted(rows):
            time = "" if times[step] != times[step] else times[step]
            yield _line([run.files.name, f"{step:.0f}", time, *(rows[step].get(name, "") for name in names)])


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue()
