"""What a job may cost, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Status = Literal["ok", "timeout", "crashed", "killed", "out_of_memory", "error"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""``ok``: there is a value. ``timeout``: the time was up. ``crashed``: the process ended, by a fault such as SIGSEGV,
by ``sys.exit``, by closing its connection. ``killed``: a signal that others send (SIGKILL, SIGTERM, SIGSTOP) ended the
process or held it, in every attempt. ``out_of_memory``: the memory was up. ``error``: it raised."""


@dataclass(frozen=True)
class Budget:
    """What one job may take."""

    timeout_s: float = 30.0
    """Seconds from its start to its reply."""
    memory_mb: int | None = 4096
    """Memory beyond what the worker holds before its first job; None is no limit."""
    start_timeout_s: float = 300.0
    """Seconds that a worker may take to load the function."""
    kill_retries: int = 2
    """How often a job is tried again, with its whole time, whose process was killed by a signal that others send."""


@dataclass(frozen=True)
class Outcome:
    """What came of a job: a value, or why there is none."""

    status: Status
    value: Any = None
    message: str = ""
    """The traceback, the exit status, or the limit that was passed; empty if all is well."""
