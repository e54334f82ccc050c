"""Waiting until it is enough: a condition that is asked now and then, and at once after a notice."""

from __future__ import annotations

import threading
from collections.abc import Callable

POLL_S = 0.1
"""Seconds between checks of the condition without a notice."""


class Polling:
    """Asks a condition every ``POLL_S`` seconds, and at once after :meth:`notify`."""

    def __init__(self) -> None:
        self._noticed = threading.Event()

    def notify(self) -> None:
        """Let the condition be asked at once; from any thread."""
        self._noticed.set()

    def until(self, is_enough: Callable[[], bool], check: Callable[[], object] = lambda: None) -> None:
        """Wait until ``is_enough`` returns true; call ``check`` in between."""
        while True:
            self._noticed.clear()
            if is_enough():
                return
            check()
            self._noticed.wait(POLL_S)
