"""Graceful stop on SIGTERM, which schedulers and clouds send before they take a machine away."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

logger = logging.getLogger(__name__)

# Exit code of a run that saved and stopped because of SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later". The same
# command resumes the run (trainer.resume_mode=auto).
EXIT_CODE = 75

# A second SIGTERM within this time is taken for the same request: a sender that signals the whole process group reaches
# this process directly and through its parent, which forwards it (verl.supervision.restarts).
_SAME_NOTICE_S = 2.0

_RESEND_S = 0.05  # for the callback that ignored an error to end


class StepInterrupted(BaseException):
    """Raised by SIGTERM in a step that does not have to be finished."""


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise KeyboardInterrupt and StepInterrupted from the block as themselves.

    A signal's handler raises them wherever the program is. An extension written in C may turn them into a SystemError,
    a library into an error of its own: then they are its cause or its context.
    """
    try:
        yield
    except Exception as error:  # libraries wrap an interrupt in errors of any kind; it, or the error, is raised again
        link: BaseException | None = error
        while link is not None and not isinstance(link, KeyboardInterrupt | StepInterrupted):
            link = link.__cause__ or link.__context__
        if link is None:
            raise
        raise link from None


@contextmanager
def not_ignored(error: type[BaseException], signum: signal.Signals, forget: Callable[[], None]) -> Iterator[None]:
    """Send a signal again if Python ignores the error that its handler raised.

    Python ignores errors in destructors and in the callbacks of ``os.fork``, in which a signal often arrives because
    it waits for the end of the fork.

    Args:
        error: what the handler raises.
        signum: the signal.
        forget: called before it is sent again.
    """
    before = sys.unraisablehook

    def on_ignored(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is not error:
            before(ignored)
            return
        forget()
        resend = threading.Timer(_RESEND_S, os.kill, (os.getpid(), signum))
        resend.daemon = True
        resend.start()

    sys.unraisablehook = on_ignored
    try:
        yield
    finally:
        sys.unraisablehook = before


class Termination:
    """Context in which the first SIGTERM sets :attr:`requested`; a later one ends the process.

    Within :meth:`interrupting` the first one also raises StepInterrupted. Outside of the main thread, where Python
    cannot install signal handlers, the context does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._noted_at = 0.0
        self._interrupts = False
        self._is_ignored = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._is_installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._is_installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._is_installed = False

    @contextmanager
    def interrupting(self, allowed: bool) -> Iterator[None]:
        """If ``allowed``, SIGTERM raises StepInterrupted in the block at once."""
        self._interrupts = allowed
        try:
            with not_ignored(StepInterrupted, signal.SIGTERM, self._expect_again):
                yield
        finally:
            self._interrupts = False

    def _expect_again(self) -> None:
        self._is_ignored = self._interrupts = True

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if self.requested and not self._is_ignored:
            if time.monotonic() < self._noted_at + _SAME_NOTICE_S:
                return
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.requested, self._is_ignored, self._noted_at = True, False, time.monotonic()
        logger.warning(
            "SIGTERM: the run saves %s, and exits with code %d; the same command goes on from there. A second SIGTERM, "
            "some seconds later, ends it at once.",
            "the state before this step" if self._interrupts else "when this step is done",
            EXIT_CODE,
        )
        if self._interrupts:
            self._interrupts = False
            raise StepInterrupted
