"""SIGTERM, by which a scheduler or a cloud takes a machine away: save, and say by the exit code that work is left."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

logger = logging.getLogger(__name__)

EXIT_CODE = 75
"""Of a run that saved and stopped because of SIGTERM: ``EX_TEMPFAIL`` of sysexits.h, "try again later".

The same command goes on from there (``trainer.resume_mode=auto``)."""


_SAME_NOTICE_S = 2.0
"""Within which a SIGTERM is the one before, come another way: who ends a whole group of processes tells this one, and
the supervisor, which passes it on."""


class StepInterrupted(BaseException):
    """SIGTERM came within a step that need not be finished."""


class Termination:
    """Within its context the first SIGTERM sets :attr:`requested`; a later one ends the process as usual.

    Within :meth:`interrupting` the first one raises StepInterrupted too. Signals reach the main thread of a process;
    in another thread the context does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._noted_at = 0.0
        self._interrupts = False
        self._before: Any = None
        self._is_installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._is_installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._is_installed = False

    @contextmanager
    def interrupting(self, allowed: bool) -> Iterator[None]:
        """If ``allowed``, the block is left by StepInterrupted as soon as SIGTERM comes."""
        self._interrupts = allowed
        try:
            yield
        finally:
            self._interrupts = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() < self._noted_at + _SAME_NOTICE_S:
                return
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.requested, self._noted_at = True, time.monotonic()
        logger.warning(
            "SIGTERM: the run saves %s, and exits with code %d; the same command goes on from there. A second SIGTERM, "
            "some seconds later, ends it at once.",
            "the state before this step" if self._interrupts else "when this step is done",
            EXIT_CODE,
        )
        if self._interrupts:
            self._interrupts = False
            raise StepInterrupted
