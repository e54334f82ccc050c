"""Run a block of code in a child process that is restarted when a signal kills it.

::

    with restarted_when_killed(restarts=3) as attempt:   # the parent waits here, and exits with the code of the child
        run()                                            # in the child

The child is a fork: modules imported before take no time and, with shared pages, no memory again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

from verl.supervision.interruption import EXIT_CODE as INTERRUPTED
from verl.supervision.interruption import Interrupts, end_at_once
from verl.supervision.prctl import die_with_parent

logger = logging.getLogger(__name__)

# Signals after which a child is restarted; other signals mean that somebody wants it to end.
DEATHS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})

_END_S = 2.0  # for the child to end by itself after a second SIGINT; it may be in C code and not see signals


@contextmanager
def restarted_when_killed(restarts: int) -> Iterator[int]:
    """Execute the block in a child process, and again in a new one if a signal of ``DEATHS`` kills it; on Linux only.

    A child that exits before the end of the block counts as killed too: Ray's C++ code exits the driver when the
    node's Ray process has died. SIGTERM and SIGINT are forwarded to the child, which also gets SIGTERM when the
    parent dies. After SIGTERM there is no restart. A second SIGINT ends parent and child at once.

    Args:
        restarts: maximum number of restarts.

    Yields:
        In the child: the number of restarts so far.

    Raises:
        SystemExit: in the parent, with the exit code of the child, or 128 + the number of the signal that ended it,
            or 128 + SIGTERM if the child was killed after a SIGTERM.
    """
    parent = os.getpid()
    for attempt in range(restarts + 1):
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        with _ForwardedSignals() as signals:
            child = os.fork()
            if child:
                signals.forward_to(child)
                _, status = os.waitpid(child, 0)
        if child == 0:
            os.close(reader)
            die_with_parent(signal.SIGTERM)
            if os.getppid() != parent:  # the parent died before die_with_parent took effect
                os.kill(os.getpid(), signal.SIGTERM)
            signals.forward_to(os.getpid())
            try:
                yield attempt
            finally:
                os.write(writer, b".")
            return
        os.close(writer)
        code, has_finished = os.waitstatus_to_exitcode(status), bool(os.read(reader, 1))
        os.close(reader)
        if (has_finished and code >= 0) or code == INTERRUPTED:
            raise SystemExit(code)
        how = signal.Signals(-code).name if code < 0 else f"an exit with code {code} from outside of Python"
        if signals.is_terminated:
            # Whoever sends it to all processes of a job, as Slurm and systemd do, also ends Ray's, and so the driver.
            logger.error("SIGTERM: the driver was ended by %s before it had saved; the run is not started again.", how)
            raise SystemExit(128 + signal.SIGTERM)
        if (code < 0 and -code not in DEATHS) or attempt == restarts:
            logger.error("the driver was ended by %s%s.", how, f", {attempt + 1} times" if attempt else "")
            raise SystemExit(128 - code if code < 0 else code or 1)
        logger.error("the driver was killed by %s. Restart %d of at most %d.", how, attempt + 1, restarts)


class _ForwardedSignals:
    """Context in which SIGTERM and SIGINT are forwarded to another process, set by :meth:`forward_to`.

    Attributes:
        is_terminated: whether SIGTERM came.
    """

    def __init__(self) -> None:
        self.is_terminated = False
        self._process = 0
        self._pending: list[int] = []
        self._interrupts = Interrupts(self._end)
        self._end_timer = threading.Timer(_END_S, end_at_once)
        self._end_timer.daemon = True
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        self._before = {signum: signal.signal(signum, self._on_signal) for signum in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler or signal.SIG_DFL)
        self._end_timer.cancel()

    def forward_to(self, process: int) -> None:
        """Forward signals to this process, including those that came before this call."""
        self._process = process
        for signum in self._pending:
            os.kill(process, signum)
        self._pending.clear()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGTERM:
            self.is_terminated = True
        elif not self._interrupts.note():
            return
        self._forward(signum)

    def _end(self) -> None:
        """Forward the second SIGINT, at which the child ends itself; end all processes if it has not after a while."""
        self._end_timer.start()
        self._forward(signal.SIGINT)

    def _forward(self, signum: int) -> None:
        if not self._process:
            self._pending.append(signum)
            return
        with suppress(ProcessLookupError):  # it has just ended
            if signum == signal.SIGINT and _is_in_foreground(self._process):
                return  # Ctrl-C: the terminal sends it to the child, too
            os.kill(self._process, signum)


def _is_in_foreground(process: int) -> bool:
    """Return whether a process is in the foreground process group of this process's terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgid(process)
    finally:
        os.close(terminal)
