"""Runs a command, and ends it with all that it started when its owner is gone.

    server_guard.py OWNER_PID FOLDER[:FOLDER...] COMMAND...

When the owner is gone, the folders are removed too.

A file of its own, on the standard library alone, so that it starts in milliseconds. It must be started as
the leader of a new session: whatever the command starts is then in its process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from types import FrameType

POLL_S = 0.5
GRACE_S = 10.0
"""Time to end in good order before everything in the group is killed."""
ENDED = " ended with status "
"""Stands in the log of every server that ended by itself, after its command."""
_PR_SET_PDEATHSIG = 1


def _die_with_the_guard() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(owner: int, folders: list[str], command: list[str]) -> None:
    """Run ``command`` until it ends, the owner is gone, or SIGTERM comes; then kill the whole group, this too.

    SIGTERM leaves the command time to end by itself. Where the owner is gone nobody needs that, and whoever takes the
    owner's place needs the memory.
    """
    asked_to_stop = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what Ctrl-C means
    # Only the guard's main thread starts anything, so the signal at a parent's death means the guard's.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_the_guard)
    while process.poll() is None and not asked_to_stop and os.getppid() == owner:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    if process.poll() is None and asked_to_stop:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # one that somebody has stopped ends only if it goes on
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    elif process.poll() is not None:
        sys.stdout.write(f"\n{command[0]}{ENDED}{process.returncode}.\n")
        sys.stdout.flush()
    if os.getppid() != owner:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(os.pathsep), sys.argv[3:])
