"""Log the metrics and tables of a run to any number of trackers, chosen by name."""

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
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from verl.base.redact import redacted, secrets_in, without_secrets
from verl.errors import ConfigError, VerlError
from verl.tracking import local, services  # noqa: F401 (they file their trackers)
from verl.tracking.base import TRACKERS, Tracker
from verl.utils.file_log import THIS_RUN
from verl.utils.run_log import STAGE_NOTE

if TYPE_CHECKING:
    from verl.utils.token_page import TokenPage

__all__ = ["TRACKERS", "Tracker", "Tracking", "ValidationGenerationsLogger", "require_trackers"]

logger = logging.getLogger(__name__)

# Back-off: a call that fails after more than SLOW_S seconds would hold up every step. After the n-th such failure in a
# row the tracker skips its next 2^n - 1 calls, at most MAX_SKIPPED_CALLS.
SLOW_S = 1.0
MAX_SKIPPED_CALLS = 63

_NO_ANSWER = re.compile(
    r"connection (refused|reset|aborted|error)|timed? ?out|max retries|unreachable|name resolution|failed to connect",
    re.IGNORECASE,
)

Names = str | Iterable[str]


class Tracking:
    """Sends metrics and tables of a run to its trackers.

    A tracker that cannot start raises, except if its server is unreachable and there are other trackers: then later
    calls try again. Errors of later calls do not reach the caller: the first one of a tracker is logged with its
    traceback, slow failures make the tracker skip some calls, and ``finish`` logs how many calls failed.

    Example:
        >>> with Tracking("gsm8k", "grpo-1", ["console", "file"], {"lr": 1e-6}) as tracking:
        ...     tracking.log({"actor/pg_loss": 0.1}, step=1)

    Args:
        project_name: project that groups runs.
        experiment_name: name of this run.
        default_backend: names of the trackers.
        config: the run's settings, nested. Secrets are masked here and in ``sys.argv`` before a tracker reads them.
            A service may collect data in other ways, so pass secrets in environment variables.
        resumed_after: the last step before the run was resumed, 0 for a new run. Trackers that can drop records of
            later steps do so, because these steps are repeated.
        run_ids: :attr:`run_ids` of the process whose run is resumed.

    Raises:
        ConfigError: a name is unknown, or the package of a tracker is not installed.
        Exception: any error that the client of a tracker raised when it started.
    """

    supported_backend: ClassVar[list[str]] = TRACKERS.names()
    opened: ClassVar[list[Tracking]] = []
    """Instances of this process that are not finished, in order of creation."""
    listeners: ClassVar[list[Callable[[Mapping[str, float], int], None]]] = []
    """Called with the metrics and the step of every :meth:`log` in this process."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: Names = "console",
        config: Mapping[str, object] | None = None,
        resumed_after: int = 0,
        run_ids: Mapping[str, str] | None = None,
    ) -> None:
        names = _names(default_backend)
        require_trackers(names)
        self.run = (project_name, experiment_name)
        settings = without_secrets(config or {})
        secrets = secrets_in(config or {})
        self.trackers: dict[str, Tracker] = {}
        self._health: dict[str, _Health] = {}
        self._ignored: set[str] = set()

        def start(name: str) -> None:
            with _masked_command_line(secrets), _going_on(name, (run_ids or {}).get(name)):
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
            except Exception as error:  # trackers raise errors of their own; only an unreachable server is passed over
                if len(names) == 1 or not _is_unreachable(error):
                    raise
                self._health[name].calls += 1
                self._health[name].has_failed(error, time.monotonic() - began)
        self.opened.append(self)

    @property
    def run_ids(self) -> dict[str, str]:
        """Ids of this run by tracker, for trackers whose runs can be continued by a later process."""
        return {name: tracker.run_id for name, tracker in self.trackers.items() if tracker.run_id is not None}

    @classmethod
    def run_in_files(cls) -> str:
        """Id of the run of this process in its files: the tracker ``file`` has it, also of a run that was resumed."""
        ids = [tracking.run_ids["file"] for tracking in cls.opened if "file" in tracking.run_ids]
        return ids[-1] if ids else THIS_RUN

    def log(self, data: Mapping[str, object], step: int, backend: Names | None = None) -> None:
        """Record metrics of a step, in all trackers or those named by ``backend``.

        Metrics are Python, numpy or torch scalars. Other values are skipped, with a warning the first time.
        """
        metrics = {}
        for name, value in data.items():
            as_number = to_number(value)
            if as_number is not None:
                metrics[name] = as_number
            elif name not in self._ignored:
                self._ignored.add(name)
                logger.warning("metric '%s' is a %s, not a number; it is not logged.", name, type(value).__name__)
        for name in self._chosen(backend):
            self._call(name, lambda tracker: tracker.log(metrics, step))
        for listener in self.listeners:
            listener(metrics, step)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        step: int,
        backend: Names | None = None,
    ) -> None:
        """Record a table in the trackers that support tables; ``step`` and ``backend`` as in :meth:`log`."""
        for tracker_name in self._chosen(backend):
            self._call(tracker_name, lambda tracker: tracker.log_table(name, columns, rows, step))

    @property
    def takes_pages(self) -> bool:
        """True if some tracker stores pages of :meth:`log_page`; if not, drawing one is wasted."""
        return any(TRACKERS.get(name).log_page is not Tracker.log_page for name in self._health)

    def log_page(self, name: str, page: TokenPage, step: int) -> None:
        """Record a page of tokens of a step in the trackers that take pages."""
        for tracker_name in self._health:
            if TRACKERS.get(tracker_name).log_page is not Tracker.log_page:
                self._call(tracker_name, lambda tracker: tracker.log_page(name, page, step))

    def log_checkpoint(self, step: int, folder: Path) -> None:
        """Give a checkpoint to the trackers that keep files; returns when they have it, or a copy of it."""
        for name in self._health:
            if TRACKERS.get(name).log_checkpoint is not Tracker.log_checkpoint:
                self._call(name, lambda tracker: tracker.log_checkpoint(step, folder))

    @property
    def keeps_events(self) -> bool:
        """True if some tracker stores events of :meth:`log_event`; if not, collecting them is wasted."""
        return any(type(tracker).log_event is not Tracker.log_event for tracker in self.trackers.values())

    def log_event(self, event: str, **details: object) -> None:
        """Record what happened to the run, in the trackers that keep such a record; see :meth:`Tracker.log_event`."""
        for name, tracker in self.trackers.items():
            if type(tracker).log_event is not Tracker.log_event:
                with self._guard(name):
                    tracker.log_event(event, details)

    def log_alert(self, step: int, rule: str, reason: str) -> None:
        """Record a sign of trouble as the event ``alert``, and show it in the trackers that have a place for it."""
        self.log_event("alert", step=step, rule=rule, reason=reason)
        for name, tracker in self.trackers.items():
            if type(tracker).log_alert is not Tracker.log_alert:
                with self._guard(name):
                    tracker.log_alert(step, rule, reason)

    def finish(self, exit_code: int = 0) -> None:
        """Flush and close all trackers, and log how many of their calls failed; later calls do nothing.

        Args:
            exit_code: not passed on: services see by themselves whether the process failed.
        """
        for name, health in self._health.items():
            if name in self.trackers:
                with self._guard(name):
                    self.trackers[name].finish()
            if health.failed:
                logger.warning(
                    "tracker '%s' failed in %d of %d calls; its record has gaps.", name, health.failed, health.calls
                )
        self.trackers, self._health = {}, {}
        if self in self.opened:
            self.opened.remove(self)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        stopped = isinstance(error, SystemExit | KeyboardInterrupt)
        self.log_event("end", status="done" if kind is None else "stopped" if stopped else "failed", why=_why(error))
        self.finish()

    def _chosen(self, backend: Names | None) -> list[str]:
        return list(self._health) if backend is None else [name for name in _names(backend) if name in self._health]

    def _call(self, name: str, task: Callable[[Tracker], None]) -> None:
        """Run ``task`` with a tracker unless it is in back-off; start it first if that failed before."""
        if self._health[name].skips_call():
            return
        with self._guard(name):
            if name not in self.trackers:
                self._start(name)
            task(self.trackers[name])

    def _guard(self, name: str) -> _Guard:
        return _Guard(self._health[name])


@dataclass
class _Health:
    """Failure counts and back-off of a tracker."""

    name: str
    calls: int = 0
    failed: int = 0
    _in_a_row: int = 0
    _calls_to_skip: int = 0

    def skips_call(self) -> bool:
        """Return whether this call is skipped, which counts as failed."""
        if self._calls_to_skip == 0:
            return False
        self._calls_to_skip -= 1
        self.calls += 1
        self.failed += 1
        return True

    def has_failed(self, error: Exception, seconds: float) -> None:
        """Count a failed call, log the first one, and start a back-off if it was slow."""
        self.failed += 1
        if self.failed == 1:
            logger.error("tracker '%s' failed; training goes on.", self.name, exc_info=error)
        if seconds > SLOW_S:
            self._in_a_row += 1
            self._calls_to_skip = min(2**self._in_a_row - 1, MAX_SKIPPED_CALLS)

    def has_worked(self) -> None:
        """Reset the back-off after a successful call."""
        self._in_a_row = 0


class _Guard:
    """Context that counts and suppresses every exception of a tracker's client, which may be of any type.

    KeyboardInterrupt and SystemExit pass.
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


def _why(error: BaseException | None) -> str:
    """Kind and first line of an error, and the stage of the step that it ended, without secrets."""
    if error is None:
        return ""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(STAGE_NOTE)]
    return redacted(" ".join([f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", *notes]))


class ValidationGenerationsLogger:
    """Logs validation samples as a table named ``name``, in the trackers that support tables.

    Args:
        project_name: of the run whose trackers are used, with ``experiment_name``; by default that of ``tracking``.
        experiment_name: see ``project_name``.
        tracking: the trackers; by default the newest open ones of that run, or of any run without names.
        name: of the table.
    """

    def __init__(
        self,
        project_name: str | None = None,
        experiment_name: str | None = None,
        tracking: Tracking | None = None,
        name: str = "val/generations",
    ) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.tracking = tracking
        self.name = name

    def log(self, loggers: Names | None, samples: Sequence[Mapping[str, object] | Sequence[object]], step: int) -> None:
        """Record samples of one validation, in the trackers named by ``loggers``; None is all.

        Samples are mappings with some of the keys ``input``, ``output``, ``gts``, ``score``, which become columns, or
        tuples of input, output and score.
        """
        parts = ("input", "output", "score")
        records: list[Mapping[str, object]] = [
            sample if isinstance(sample, Mapping) else dict[str, object](zip(parts, sample, strict=True))
            for sample in samples
        ]
        columns = [name for name in ("input", "output", "gts", "score") if any(name in record for record in records)]
        rows = [[step, *(record.get(name, "") for name in columns)] for record in records]
        if rows:
            self._trackers().log_table(self.name, ["step", *columns], rows, step, loggers)

    def _trackers(self) -> Tracking:
        if self.tracking is not None:
            return self.tracking
        run = (self.project_name, self.experiment_name)
        trackers = [tracking for tracking in Tracking.opened if run in ((None, None), tracking.run)]
        if not trackers:
            raise ConfigError(
                f"there are no open trackers of project_name={run[0]}, experiment_name={run[1]} in this process. Make "
                "a verl.utils.tracking.Tracking of these names first, or pass it as tracking=."
            )
        return trackers[-1]


def require_trackers(names: Names) -> None:
    """Check that every tracker is known and its package is installed, at the start of a run."""
    for name in _names(names):
        TRACKERS.get(name).require()


def to_number(value: object) -> int | float | None:
    """Convert a Python, numpy or torch scalar to a Python number; None for other values. NaN stays NaN."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.size == 1 if isinstance(value, np.ndarray) else value.numel() == 1:
            value = value.item()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float) else None


@contextlib.contextmanager
def _masked_command_line(secrets: list[str]) -> Iterator[None]:
    """Mask secrets in ``sys.argv`` and ``sys.orig_argv``, which clients and logs record when they start."""
    arguments, typed = sys.argv, sys.orig_argv
    sys.argv, sys.orig_argv = ([redacted(argument, secrets) for argument in words] for words in (arguments, typed))
    try:
        yield
    finally:
        sys.argv, sys.orig_argv = arguments, typed


@contextlib.contextmanager
def _going_on(name: str, run_id: str | None) -> Iterator[None]:
    """Set the environment variables with which a tracker continues a run, unless the user has set one of them."""
    run_variables = {} if run_id is None else TRACKERS.get(name).variables_of_run(run_id)
    added_variables = {} if any(key in os.environ for key in run_variables) else run_variables
    os.environ.update(added_variables)
    try:
        yield
    finally:
        for key in added_variables:
            os.environ.pop(key, None)


def _names(backends: Names) -> list[str]:
    """Unique tracker names in order; ``tracking`` is an old name of wandb."""
    names = [backends] if isinstance(backends, str) else list(backends)
    return list(dict.fromkeys("wandb" if name == "tracking" else name for name in names))


def _is_unreachable(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, means that a server did not answer."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) or _NO_ANSWER.search(str(error)):
            return not isinstance(error, VerlError)
        error = error.__cause__ or error.__context__
    return False


def _start(name: str, project_name: str, experiment_name: str, config: Mapping[str, object]) -> Tracker:
    try:
        return TRACKERS.get(name)(project_name, experiment_name, config)
    except Exception as error:  # trackers raise anything; raised again with a note
        error.add_note(f"This happened when tracker '{name}' started. Take it out of the trackers to run without it.")
        raise
