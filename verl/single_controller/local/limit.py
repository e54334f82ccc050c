"""Time limit for calls of a worker in the driver's own process."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from verl.errors import ProcessLostError
from verl.supervision.processes import life

INTERRUPT = signal.SIGUSR2

# After this time beyond the limit, the call is taken to hang in C code that holds the interpreter's lock, so that only
# faulthandler's own thread can still write the stacks.
_GRACE_S = 1.0


class CallLimit:
    """Time limit for calls, shared by all groups over the same worker.

    A call may take any time, and be silent for ``hang_timeout_s``: since its begin, since it last showed life
    (:func:`~verl.supervision.processes.show_life`), or by a measure of its own (:meth:`limit_silence`).

    When the time is over, the stacks of all threads are written to stderr in any case. The call itself is interrupted
    only if it runs in the main thread and returns to the Python interpreter: loops and sleeps in Python are
    interrupted, a call into C that never returns is not.
    """

    def __init__(self) -> None:
        self.hang_timeout_s: float | None = None
        self._silent_s: Callable[[], float] | None = None

    @contextmanager
    def limit_silence(self, silent_s: Callable[[], float]) -> Iterator[None]:
        """Limit how long calls in the block are silent, instead of how long they take.

        Args:
            silent_s: returns the seconds since the last sign of life; called from another thread.
        """
        self._silent_s = silent_s
        try:
            yield
        finally:
            self._silent_s = None

    @contextmanager
    def applied_to(self, stage: str) -> Iterator[None]:
        """Raise a ProcessLostError, which names ``stage``, if the block is silent for ``hang_timeout_s``."""
        if self.hang_timeout_s is None:
            yield
            return
        began = time.monotonic()
        silent_s = self._silent_s or (lambda: time.monotonic() - max(began, life.shown_at))
        faulthandler.dump_traceback_later(self.hang_timeout_s + _GRACE_S, file=_stderr())
        try:
            with _interrupted(self.hang_timeout_s, silent_s, stage):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def _interrupted(timeout_s: float, silent_s: Callable[[], float], stage: str) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over, changing = threading.Event(), threading.Lock()

    def watch() -> None:
        left_s = timeout_s - silent_s()
        while not over.wait(left_s):
            left_s = timeout_s - silent_s()
            with changing:
                # After the call the signal has no handler of ours any more, so it must not be sent.
                if over.is_set():
                    return
                if left_s > 0:
                    faulthandler.dump_traceback_later(left_s + _GRACE_S, file=_stderr())
                    continue
                faulthandler.cancel_dump_traceback_later()
                faulthandler.dump_traceback(_stderr())
                signal.pthread_kill(caller, INTERRUPT)
                return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if not over.is_set():
            raise ProcessLostError(
                f"{stage} has not answered within hang_timeout_s={timeout_s:g} s, and was interrupted in "
                f"{_place(frame)}. The stacks of all threads were written to stderr."
            )

    caller = threading.get_ident()
    before = signal.signal(INTERRUPT, on_signal)
    threading.Thread(target=watch, name="hang limit", daemon=True).start()
    try:
        yield
    finally:
        with changing:
            over.set()
        if before is not None:  # None: the handler was installed from C and cannot be restored from Python
            signal.signal(INTERRUPT, before)


def _stderr() -> TextIO:
    return sys.__stderr__ or sys.stderr  # faulthandler needs a file descriptor, which a replaced sys.stderr may lack


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "no frame of Python"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
