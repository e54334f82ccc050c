"""Parent-death signals and adoption of orphans, with Linux's prctl(2); on other systems the functions do nothing.

Imports the standard library only, so that programs which must start within milliseconds can use it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 1, 36, 37  # linux/prctl.h


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process the signal ``signum`` when the thread that started it ends.

    If the parent has ended before this call, no signal comes: compare ``os.getppid()`` with its pid afterwards.
    """
    _prctl(_SET_PDEATHSIG, signum)


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of descendants whose own parent ends; this process then has to wait for them."""
    _prctl(_SET_CHILD_SUBREAPER, int(adopt))


def adopts_orphans() -> bool:
    """Return whether :func:`adopt_orphans` is in force."""
    value = ctypes.c_int()
    _prctl(_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def _prctl(option: int, argument: object) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
