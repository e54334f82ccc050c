"""Processes of this machine, by number: how they are, and how they end. Imports neither torch nor Ray."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STOPPED = "tT"
"""States of a process that a signal or a debugger holds."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """Send this process a signal when the one that started it has died, however it died; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def open_closed_streams() -> None:
    """Let standard input, output and error that this process was started without lead to nowhere.

    Else the next file or socket gets the number of one of them, and is read and written as such.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  (the number may be another file's by now)
            setattr(sys, name, stream)


def state_of(pid: int) -> str:
    """The letter of a process's state (``R`` runs, ``S`` sleeps, ``D`` cannot be woken, ``T`` is stopped, ...).

    Empty if there is no such process, or only its exit status is left of it.
    """
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter in "ZX" else letter


def title_of(pid: int) -> str:
    """The command line of a process, or the title that it gave itself; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def end_processes(pids: Sequence[int], title: str, patience_s: float = 1.0, timeout_s: float = 10.0) -> list[int]:
    """Wait until processes that were told to end are gone; those that do not go are killed.

    Args:
        pids: their numbers.
        title: what their titles contain; a process without it got the number of one that is gone.
        patience_s: how long a process may take to end by itself. A stopped one cannot, and gets no time.
        timeout_s: how long all may take in total.

    Returns:
        Those that are still there, because the kernel holds them.
    """
    start = time.monotonic()
    left = list(pids)
    while True:
        # One that is about to end has given up its title before its number.
        left = [pid for pid in left if state_of(pid) and (title in title_of(pid) or not title_of(pid))]
        passed = time.monotonic() - start
        if not left or passed > timeout_s:
            return left
        for pid in left:
            if passed > patience_s or state_of(pid) in STOPPED:
                _kill(pid)
        time.sleep(0.02)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        # It went by itself in between.
        return
