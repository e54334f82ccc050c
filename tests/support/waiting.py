"""For tests of processes and threads: wait for what they do, and act while something runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psutil
import pytest

from verl.supervision.processes import is_alive

__all__ = ["eventually", "is_alive", "meanwhile"]

T = TypeVar("T")


def eventually(holds: Callable[[], T], what: str | Callable[[], str], within_s: float = 60) -> T:
    """The first true value of ``holds``; the test fails where none comes.

    The time is a limit that no healthy machine comes near, not a measurement.
    """
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.01)
    return found


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Calls ``act`` again and again in a thread."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            try:
                act()
            except psutil.Error:  # it has ended while we looked
                continue
            done.wait(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
