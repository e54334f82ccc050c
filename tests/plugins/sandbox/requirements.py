"""Tests that run programs need bubblewrap and namespaces; where they cannot be had, the reason is shown.

What decides is bubblewrap alone, and not our own probe: a wall that our code builds badly fails tests.
"""

import functools
import shutil
import subprocess

import pytest

from verl.plugins.sandbox.bubblewrap import INSTALL


@functools.cache
def missing() -> str:
    """Why bubblewrap cannot work here; empty if it can."""
    if shutil.which("bwrap") is None:
        return f"bubblewrap is not installed: {INSTALL}"
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stderr.strip() if done.returncode else ""


needs_sandbox = pytest.mark.skipif(bool(missing()), reason=f"no sandbox here: {missing()}")
