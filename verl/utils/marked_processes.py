"""Processes that are found again whatever became of their parents: by a mark in their environment.

A child inherits the environment variables of its parent, also one that leaves its process group and its session and
whose parent has ended. So what a helper process leaves behind when it is killed can be ended by whoever started it.
Linux alone; elsewhere nothing is found.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from pathlib import Path

import psutil

VARIABLE = "VERL_HELPER_PROCESS"
KILL_S = 10.0
"""How long killed processes may take to end: on a busy machine one ends when it gets a core."""
_PAUSE_S = 0.01

logger = logging.getLogger(__name__)


def new_mark() -> str:
    """The value of :data:`VARIABLE` for one helper and all that it starts."""
    return secrets.token_hex(16)


def kill_marked(mark: str) -> None:
    """Kill all of them, and wait until they have ended; who is just being forked is found in a further round.

    Those that are there after ``KILL_S`` are named in the log.
    """
    deadline = time.monotonic() + KILL_S
    word = f"{VARIABLE}={mark}".encode()
    empty_rounds = 0
    while empty_rounds < 2:  # a process that is just executing a program has no environment for a moment
        left = [pid for pid in psutil.pids() if word in _environment_of(pid) and _kill(pid)]
        empty_rounds = 0 if left else empty_rounds + 1
        if left and time.monotonic() > deadline:
            logger.warning(
                "processes %s were killed and are still there after %g s: the kernel holds them, or they multiply. "
                "Their memory, ports and files are not free.",
                ", ".join(map(str, left)),
                KILL_S,
            )
            return
        time.sleep(_PAUSE_S)


def _kill(pid: int) -> bool:
    """Whether it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        return isinstance(error, PermissionError)  # it has taken other rights
    return True


def _environment_of(pid: int) -> list[bytes]:
    """The variables that a process was started with; none of one that has ended, or that is not ours to read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
