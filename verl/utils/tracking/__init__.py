"""Where metrics go: one call, any number of trackers chosen by name."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import torch

from verl.utils.redact import redacted, secrets_in, without_secrets
from verl.utils.tracking import local, services  # noqa: F401 (they file their trackers)
from verl.utils.tracking.base import TRACKERS, Tracker

__all__ = ["TRACKERS", "Tracker", "Tracking", "ValidationGenerationsLogger", "require_trackers"]

logger = logging.getLogger(__name__)

Names = str | Iterable[str]


class Tracking:
    """Sends what a run logs to its trackers.

    A tracker that cannot start stops the run: that is the time to repair it. One that fails later
    does not: its first error is logged with its traceback, and ``finish`` says how many calls
    failed.

    Example:
        >>> with Tracking("gsm8k", "grpo-1", ["console", "file"], {"lr": 1e-6}) as tracking:
        ...     tracking.log({"actor/pg_loss": 0.1}, step=1)

    Args:
        project_name: groups runs.
        experiment_name: names this one.
        default_backend: a name or names of trackers.
        config: the run's settings, nested; secrets among them are masked before any tracker sees it.
            So is the command line, as a tracker finds it in ``sys.argv``. What a service collects by
            other ways is not in our hands: give secrets by environment variables.
        resumed_after: the step that the run goes on after; what a tracker holds of later ones, which are done
            again, is dropped where it can be. 0 for a new run.
        run_ids: :attr:`run_ids` of the process that the run goes on from.

    Raises:
        ConfigError: a name is unknown, or the package of a tracker is not installed.
    """

    supported_backend: ClassVar[list[str]] = TRACKERS.names()

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: Names = "console",
        config: Mapping[str, Any] | None = None,
        resumed_after: int = 0,
        run_ids: Mapping[str, str] | None = None,
    ) -> None:
        names = _names(default_backend)
        require_trackers(names)
        settings = without_secrets(config or {})
        known = secrets_in(config or {})
        self.trackers: dict[str, Tracker] = {}
        self._failures: dict[str, list[int]] = {}
        self._ignored: set[str] = set()
        for name in names:
            with _masked_command_line(known), _going_on(name, (run_ids or {}).get(name)):
                self.trackers[name] = _start(name, project_name, experiment_name, settings)
            self._failures[name] = [0, 0]
            if resumed_after:
                with self._guard(name):
                    self.trackers[name].go_on_after(resumed_after)

    @property
    def run_ids(self) -> dict[str, str]:
        """What the services call this run, by tracker, where a later process can go on with it."""
        return {name: tracker.run_id for name, tracker in self.trackers.items() if tracker.run_id is not None}

    def log(self, data: Mapping[str, Any], step: int, backend: Names | None = None) -> None:
        """Record metrics of a step.

        Args:
            data: numbers by name: Python, numpy or torch scalars. Anything else is left out, with a
                warning the first time.
            step: the step.
            backend: only these trackers; None is all.
        """
        metrics = {}
        for name, value in data.items():
            number = to_number(value)
            if number is not None:
                metrics[name] = number
            elif name not in self._ignored:
                self._ignored.add(name)
                logger.warning("metric '%s' is a %s, not a number; it is not logged.", name, type(value).__name__)
        for name in self._chosen(backend):
            with self._guard(name):
                self.trackers[name].log(metrics, step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int, backend: Names | None = None
    ) -> None:
        """Record a table, in the trackers that can show one; arguments as in :meth:`log`."""
        for tracker in self._chosen(backend):
            with self._guard(tracker):
                self.trackers[tracker].log_table(name, columns, rows, step)

    def finish(self) -> None:
        """Let every tracker write the rest; say what failed. Later calls do nothing."""
        for name, tracker in self.trackers.items():
            with self._guard(name):
                tracker.finish()
            failed, calls = self._failures[name]
            if failed:
                logger.warning("tracker '%s' failed in %d of %d calls; its record has gaps.", name, failed, calls)
        self.trackers = {}

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def _chosen(self, backend: Names | None) -> list[str]:
        return list(self.trackers) if backend is None else [name for name in _names(backend) if name in self.trackers]

    def _guard(self, name: str) -> _Guard:
        return _Guard(name, self._failures[name])


class _Guard:
    """Lets no error of a tracker into the training loop: counts it, and logs the first one.

    The boundary to other people's clients, which may raise anything; an interrupt passes.
    """

    def __init__(self, name: str, count: list[int]) -> None:
        self.name = name
        self.count = count

    def __enter__(self) -> None:
        self.count[1] += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.count[0] += 1
        if self.count[0] == 1:
            logger.error("tracker '%s' failed; training goes on.", self.name, exc_info=error)
        return True


class ValidationGenerationsLogger:
    """Shows validation samples as a table in the trackers that have tables.

    Args:
        tracking: the run's trackers.
        name: of the table.
    """

    def __init__(self, tracking: Tracking, name: str = "val/generations") -> None:
        self.tracking = tracking
        self.name = name

    def log(
        self, samples: Sequence[Mapping[str, Any] | Sequence[Any]], step: int, backend: Names | None = None
    ) -> None:
        """Record samples of one validation.

        Args:
            samples: records with ``input``, ``output``, ``gts``, ``score`` (those that are there
                become columns), or tuples of input, output and score.
            step: the step.
            backend: only these trackers; None is all.
        """
        records = [_record(sample) for sample in samples]
        columns = [name for name in ("input", "output", "gts", "score") if any(name in record for record in records)]
        rows = [[step, *(record.get(name, "") for name in columns)] for record in records]
        if rows:
            self.tracking.log_table(self.name, ["step", *columns], rows, step, backend)


def _record(sample: Mapping[str, Any] | Sequence[Any]) -> Mapping[str, Any]:
    return sample if isinstance(sample, Mapping) else dict(zip(("input", "output", "score"), sample, strict=True))


def require_trackers(names: Names) -> None:
    """Make sure that every tracker exists and has its package; cheap enough to call before anything loads.

    Raises:
        ConfigError: a name is unknown, or a package is not installed.
    """
    for name in _names(names):
        TRACKERS.get(name).require()


def to_number(value: Any) -> int | float | None:
    """A Python number from a Python, numpy or torch scalar; None for anything else. NaN stays NaN."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.size == 1 if isinstance(value, np.ndarray) else value.numel() == 1:
            value = value.item()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float) else None


@contextlib.contextmanager
def _masked_command_line(known: list[str]) -> Iterator[None]:
    """Services send ``sys.argv`` along when they start."""
    arguments = sys.argv
    sys.argv = [redacted(argument, known) for argument in arguments]
    try:
        yield
    finally:
        sys.argv = arguments


@contextlib.contextmanager
def _going_on(name: str, run_id: str | None) -> Iterator[None]:
    """Let a service go on with a run, unless the user's environment says which."""
    wanted = {} if run_id is None else TRACKERS.get(name).variables_of_run(run_id)
    ours = {} if any(key in os.environ for key in wanted) else wanted
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)


def _names(backends: Names) -> list[str]:
    """Tracker names in order, each once; ``tracking`` is an older name of wandb."""
    names = [backends] if isinstance(backends, str) else list(backends)
    return list(dict.fromkeys("wandb" if name == "tracking" else name for name in names))


def _start(name: str, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> Tracker:
    try:
        return TRACKERS.get(name)(project_name, experiment_name, config)
    except Exception as error:
        error.add_note(f"This happened when tracker '{name}' started. Take it out of trainer.logger to run without it.")
        raise
