"""Run untrusted programs, such as generated code, in a sandbox of Linux namespaces.

    outcome = Sandbox().run("print(int(input()) + 1)", stdin="41", limits=Limits(wall_s=5))
    outcome.status, int(outcome.stdout)                # ("ok", 42)

bubblewrap (Debian package ``bubblewrap``) isolates each run: separate user, pid, network, IPC and host
name namespaces, a read-only root with only the interpreter, a small ``/tmp``. Kernel limits and a
system-call filter apply inside; the parent checks output, time and memory of the whole process tree.
If this machine cannot do that, no program runs, and :class:`SandboxUnavailableError` says what to install or set.
"""

from __future__ import annotations

from verl.plugins.sandbox.bubblewrap import find_setups, why_unavailable
from verl.plugins.sandbox.runner import Sandbox
from verl.plugins.sandbox.types import Limits, ProgramResult, SandboxError, SandboxUnavailableError, Status

__all__ = [
    "Limits",
    "ProgramResult",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailableError",
    "Status",
    "find_setups",
    "why_unavailable",
]
