"""How long a call in this process may take."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from verl.errors import ProcessLostError

INTERRUPT = signal.SIGUSR2

_GRACE_S = 1.0
"""After which code that keeps the interpreter's lock, so that nothing of Python can run, is taken to hang in C."""


class CallLimit:
    """Ends calls that take too long; shared by all views of the same worker.

    The stacks of all threads go to stderr when the time is over, whatever the process is doing. The call itself
    can be ended where Python gets to run in it, and if it was made by the main thread: loops and sleeps of Python
    are, a call into C that never returns is not.
    """

    def __init__(self) -> None:
        self.hang_timeout_s: float | None = None

    @contextmanager
    def over(self, stage: str) -> Iterator[None]:
        """Limit what happens inside.

        Args:
            stage: worker and method, for the message.

        Raises:
            ProcessLostError: it took too long.
        """
        if self.hang_timeout_s is None:
            yield
            return
        faulthandler.dump_traceback_later(self.hang_timeout_s + _GRACE_S, file=_stderr())
        try:
            with _interrupted(self.hang_timeout_s, stage):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def _interrupted(timeout_s: float, stage: str) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running, changing = [True], threading.Lock()

    def interrupt() -> None:
        with changing:
            # Once the call is over, nobody expects the signal any more.
            if running:
                faulthandler.cancel_dump_traceback_later()
                faulthandler.dump_traceback(_stderr())
                signal.pthread_kill(caller, INTERRUPT)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if running:
            raise ProcessLostError(
                f"{stage} has not answered within hang_timeout_s={timeout_s:g} s, and was interrupted in "
                f"{_place(frame)}. The stacks of all threads were written to stderr."
            )

    caller = threading.get_ident()
    before: Any = signal.signal(INTERRUPT, on_signal)
    timer = threading.Timer(timeout_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with changing:
            running.clear()
        if before is not None:  # None: set from C, and not known to Python
            signal.signal(INTERRUPT, before)


def _stderr() -> TextIO:
    return sys.__stderr__ or sys.stderr  # the real one has a descriptor, which faulthandler needs


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "no frame of Python"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
