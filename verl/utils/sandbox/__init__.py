"""Run programs that nobody has read: generated code, in a sandbox of Linux namespaces.

    outcome = Sandbox().run("print(int(input()) + 1)", stdin="41", limits=Limits(wall_s=5))
    outcome.status, int(outcome.stdout)                # ("ok", 42)

The walls are those of bubblewrap (Debian package ``bubblewrap``): own user or uid, pid, network, IPC
and host name spaces, a read-only root that holds the interpreter and nothing else, a small ``/tmp``.
Limits of the kernel hold inside, a system-call filter closes what limits do not count, and the parent
watches output, time and memory of the whole process tree. Where that cannot be had, nothing runs:
:class:`SandboxUnavailableError` says what is missing and which command or option supplies it.
"""

from __future__ import annotations

from verl.utils.sandbox.bubblewrap import find_walls, why_unavailable
from verl.utils.sandbox.runner import Sandbox
from verl.utils.sandbox.types import Limits, Outcome, SandboxError, SandboxUnavailableError, Status

__all__ = [
    "Limits",
    "Outcome",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailableError",
    "Status",
    "find_walls",
    "why_unavailable",
]
