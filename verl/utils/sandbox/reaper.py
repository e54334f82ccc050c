"""Collect the process that bubblewrap leaves behind.

bubblewrap ends before process 1 of the pid namespace that it made, which then belongs to process 1 of
the machine. In a container that is often a program that collects nobody, and every run would leave a
zombie for ever. So while runs are in progress this process asks the kernel for such orphans, and
collects those it knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

SET_CHILD_SUBREAPER, GET_CHILD_SUBREAPER = 36, 37
"""Options of prctl(2), from linux/prctl.h."""

_lock = threading.Lock()
_runs = 0
_was_set = False


@contextlib.contextmanager
def orphans_come_here() -> Iterator[None]:
    """Orphans of processes started inside become children of this process; nested and parallel uses count."""
    global _runs, _was_set
    with _lock:
        if _runs == 0:
            _was_set = _is_subreaper()
            _prctl(SET_CHILD_SUBREAPER, 1)
        _runs += 1
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if _runs == 0 and not _was_set:
                _prctl(SET_CHILD_SUBREAPER, 0)


def collect(pid: int) -> None:
    """Collect an orphan that has ended."""
    with contextlib.suppress(ChildProcessError):  # whoever else collects children of this process was faster
        os.waitpid(pid, os.WNOHANG)


def _is_subreaper() -> bool:
    value = ctypes.c_int()
    _prctl(GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def _prctl(option: int, argument: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
