"""Where metrics go: one call, any number of trackers chosen by name."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import torch

from verl.errors import VerlError
from verl.utils.redact import redacted, secrets_in, without_secrets
from verl.utils.tracking import local, services  # noqa: F401 (they file their trackers)
from verl.utils.tracking.base import TRACKERS, Tracker

__all__ = ["TRACKERS", "Tracker", "Tracking", "ValidationGenerationsLogger", "require_trackers"]

logger = logging.getLogger(__name__)

SLOW_S = 1.0
"""A call that fails after longer lets its tracker rest."""
LONGEST_REST = 63
"""Calls that a tracker rests at most: of those in a row that fail late, the n-th is followed by 2^n - 1."""

_NO_ANSWER = re.compile(
    r"connection (refused|reset|aborted|error)|timed? ?out|max retries|unreachable|name resolution|failed to connect",
    re.IGNORECASE,
)

Names = str | Iterable[str]


class Tracking:
    """Sends what a run logs to its trackers.

    A tracker that cannot start stops the run: that is the time to repair it. One whose server cannot be reached does
    not, if there is another tracker: it is tried again with later calls. One that fails later does not either: its
    first error is logged with its traceback, it rests for a while if its calls take long to fail, and ``finish`` says
    how many calls failed.

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
        Exception: what the client of a tracker raised when it started.
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
        self._health: dict[str, _Health] = {}
        self._ignored: set[str] = set()

        def start(name: str) -> None:
            with _masked_command_line(known), _going_on(name, (run_ids or {}).get(name)):
                tracker = _start(name, project_name, experiment_name, settings)
            self.trackers[name] = tracker
            if resumed_after:
                with self._guard(name):
                    tracker.go_on_after(resumed_after)

        self._start = start
        for name in names:
            self._health[name] = _Health(name)
            began = time.monotonic()
            try:
                start(name)
            except Exception as error:
                if len(names) == 1 or not _is_unreachable(error):
                    raise
                self._health[name].calls += 1
                self._health[name].has_failed(error, time.monotonic() - began)

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
            self._call(name, lambda tracker: tracker.log(metrics, step))

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int, backend: Names | None = None
    ) -> None:
        """Record a table, in the trackers that can show one; arguments as in :meth:`log`."""
        for chosen in self._chosen(backend):
            self._call(chosen, lambda tracker: tracker.log_table(name, columns, rows, step))

    def finish(self) -> None:
        """Let every tracker write the rest; say what failed. Later calls do nothing."""
        for name, health in self._health.items():
            if name in self.trackers:
                with self._guard(name):
                    self.trackers[name].finish()
            if health.failed:
                logger.warning(
                    "tracker '%s' failed in %d of %d calls; its record has gaps.", name, health.failed, health.calls
                )
        self.trackers, self._health = {}, {}

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def _chosen(self, backend: Names | None) -> list[str]:
        return list(self._health) if backend is None else [name for name in _names(backend) if name in self._health]

    def _call(self, name: str, task: Callable[[Tracker], None]) -> None:
        """Do ``task`` with a tracker, which is started first if it could not be before, unless it rests."""
        if self._health[name].rests():
            return
        with self._guard(name):
            if name not in self.trackers:
                self._start(name)
            task(self.trackers[name])

    def _guard(self, name: str) -> _Guard:
        return _Guard(self._health[name])


@dataclass
class _Health:
    """How a tracker does."""

    name: str
    calls: int = 0
    failed: int = 0
    _in_a_row: int = 0
    _resting: int = 0

    def rests(self) -> bool:
        """Whether this call is left out, which counts as one that failed."""
        if self._resting == 0:
            return False
        self._resting -= 1
        self.calls += 1
        self.failed += 1
        return True

    def has_failed(self, error: Exception, seconds: float) -> None:
        """Count a call that failed. A client that tries for minutes before it gives up would hold each step up so."""
        self.failed += 1
        if self.failed == 1:
            logger.error("tracker '%s' failed; training goes on.", self.name, exc_info=error)
        if seconds > SLOW_S:
            self._in_a_row += 1
            self._resting = min(2**self._in_a_row - 1, LONGEST_REST)

    def has_worked(self) -> None:
        """A call that did not fail."""
        self._in_a_row = 0


class _Guard:
    """Lets no error of a tracker into the training loop: counts it, and logs the first one.

    The boundary to other people's clients, which may raise anything; an interrupt passes.
    """

    def __init__(self, health: _Health) -> None:
        self.health = health

    def __enter__(self) -> None:
        self.health.calls += 1
        self._started = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.health.has_worked()
        elif isinstance(error, Exception):
            self.health.has_failed(error, time.monotonic() - self._started)
        return isinstance(error, Exception)


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


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether a client failed because its server did not answer; clients wrap that in errors of their own."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) or _NO_ANSWER.search(str(error)):
            return not isinstance(error, VerlError)
        error = error.__cause__ or error.__context__
    return False


def _start(name: str, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> Tracker:
    try:
        return TRACKERS.get(name)(project_name, experiment_name, config)
    except Exception as error:
        error.add_note(f"This happened when tracker '{name}' started. Take it out of trainer.logger to run without it.")
        raise
