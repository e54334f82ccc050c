"""Processes that are found again whatever became of their parents: by a mark in their environment.

A child inherits the environment variables of its parent, also one that leaves its process group and its session and
whose parent has ended. So what a helper process leaves behind when it is killed can be ended by whoever started it.
Linux alone; elsewhere nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

import psutil

VARIABLE = "VERL_HELPER_PROCESS"
_ROUNDS = 50
_PAUSE_S = 0.01


def new_mark() -> str:
    """The value of :data:`VARIABLE` for one helper and all that it starts."""
    return secrets.token_hex(16)


def marked(mark: str) -> list[int]:
    """Process ids of those that bear the mark and have not ended."""
    word = f"{VARIABLE}={mark}".encode()
    return [pid for pid in psutil.pids() if word in _environment_of(pid)]


def kill_marked(mark: str) -> None:
    """Kill all of them; who is just being forked is found in a further round."""
    for _ in range(_ROUNDS):
        found = marked(mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(_PAUSE_S)


def _environment_of(pid: int) -> list[bytes]:
    """The variables that a process was started with; none of one that has ended, or that is not ours to read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
