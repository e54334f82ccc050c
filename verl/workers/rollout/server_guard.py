"""Runs a command, and ends it with all that it started when its owner is gone.

    server_guard.py OWNER_PID FOLDER[:FOLDER...] COMMAND...

When the owner is gone, the folders are removed too.

A file of its own, on the standard library alone, so that it starts in milliseconds. It must be started as
the leader of a new session: whatever the command starts is then in its process group.

The guard may be killed itself, and its owner with it: Ray kills the children of a worker that ends. So a second process
waits for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

POLL_S = 0.5
GRACE_S = 10.0
"""Time to end in good order before everything in the group is killed."""
ENDED = " ended with status "
"""Stands in the log of every server that ended by itself, after its command."""
_PR_SET_PDEATHSIG = 1


def _die_with_the_guard() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stand_by(owner: int, folders: list[str]) -> None:
    """Start a process that does the guard's work once the guard was killed.

    An owner that still lives then finds that process by its mark, and removes the folders itself.
    """
    guard, owner_ends = os.getpid(), os.pidfd_open(owner)
    if os.fork() != 0:
        os.close(owner_ends)
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == guard:
        time.sleep(POLL_S)
    os.setsid()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(guard, signal.SIGKILL)
    select.select([owner_ends], [], [])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


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
    with contextlib.suppress(ProcessLookupError):  # the owner is gone already, as is seen below
        _stand_by(owner, folders)
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
