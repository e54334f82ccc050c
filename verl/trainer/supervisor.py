"""A process that does nothing but start the driver again when a signal kills it.

::

    python -m verl.trainer.main_ppo …       reads and checks the configuration, then waits
      └─ the driver                         does the run; killed (out of memory, kill -9, a crash in C): the next one
                                            goes on from the newest checkpoint

The driver is forked before any data or model is loaded, so it costs neither time nor, with shared pages, memory.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

from verl.utils import env
from verl.utils.checkpoint.steps import LATEST
from verl.utils.file_log import THIS_RUN, cut_own_end
from verl.utils.processes import die_with_parent

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT")

DEATHS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""Signals after which a driver is started again; all others are somebody's wish that the run ends."""


def supervised(run: Callable[[ConfigT], None]) -> Callable[[ConfigT], None]:
    """``run``, in a process that is started again when a signal kills it, up to ``trainer.recovery.driver_restarts``.

    On Linux only; elsewhere, and with 0 restarts, ``run`` itself. An exit of the driver is the exit of this process,
    with the same code; one by a signal has 128 + its number. A driver that ends from within a C library, as Ray's
    ends it when the node's own process of Ray has died, counts as killed: ``run`` never came to its end.
    """

    @functools.wraps(run)
    def start(config: Any) -> None:
        restarts = config.trainer.recovery.driver_restarts
        if restarts == 0 or sys.platform != "linux":
            run(config)
            return
        before, log, supervisor = _latest(config), _FileLog(config.trainer), os.getpid()
        for attempt in range(restarts + 1):
            sys.stdout.flush()
            sys.stderr.flush()
            reader, writer = os.pipe()
            with _PassedOn() as signals:
                child = os.fork()
                if child:
                    signals.to(child)
                    _, status = os.waitpid(child, 0)
            if child == 0:
                os.close(reader)
                die_with_parent(signal.SIGTERM)  # a run that nobody waits for saves and ends
                if os.getppid() != supervisor:  # it died before anybody would have been told
                    os.kill(os.getpid(), signal.SIGTERM)
                signals.to(os.getpid())
                if attempt and _latest(config) != before:
                    config = _going_on(config)
                elif attempt:
                    log.cut()
                try:
                    run(config)
                finally:
                    os.write(writer, b".")
                return
            os.close(writer)
            code, has_returned = os.waitstatus_to_exitcode(status), bool(os.read(reader, 1))
            os.close(reader)
            if has_returned and code >= 0:
                raise SystemExit(code)
            how = signal.Signals(-code).name if code < 0 else f"an exit with code {code} from outside of Python"
            if (code < 0 and -code not in DEATHS) or attempt == restarts:
                logger.error("the driver was ended by %s%s.", how, f", {attempt + 1} times" if attempt else "")
                raise SystemExit(128 - code if code < 0 else code or 1)
            logger.error("the driver was killed by %s. Restart %d of at most %d.", how, attempt + 1, restarts)

    return start


class _FileLog:
    """The file of the tracker ``file``, as it was before the run: a driver that begins anew logs all steps again."""

    def __init__(self, trainer: Any) -> None:
        self._path = env.file_logger_path(trainer.project_name, trainer.experiment_name)
        self._is_used = "file" in trainer.logger
        self._size = self._path.stat().st_size if self._path.exists() else 0

    def cut(self) -> None:
        """Take off what this run has written since."""
        if self._is_used and self._path.exists():
            cut_own_end(self._path, THIS_RUN, 0, self._size)


class _PassedOn:
    """Within its context SIGTERM and SIGINT go on to another process, as soon as that is known.

    Ctrl-C is not passed on: the terminal tells all processes of the group.
    """

    def __init__(self) -> None:
        self._process = 0
        self._early: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def to(self, process: int) -> None:
        """From now on, and what came before."""
        self._process = process
        for number in self._early:
            os.kill(process, number)
        self._early.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and _is_in_foreground():
            return
        if self._process:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process, number)
        else:
            self._early.append(number)


def _is_in_foreground() -> bool:
    """Whether the keys of a terminal reach this process."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _latest(config: Any) -> tuple[int, ...] | None:
    """Tells one state of the file that names the latest checkpoint from another."""
    try:
        found = (Path(config.trainer.default_local_dir).expanduser() / LATEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _going_on(config: Any) -> Any:
    """The same run, from what it has saved itself, whatever it was started from."""
    return replace(config, trainer=replace(config.trainer, resume_mode="auto"))
