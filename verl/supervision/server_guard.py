"""Program that runs a command and, when its owner has ended, kills the command's process group and removes folders.

    server_guard.py OWNER_PID FOLDER[:FOLDER...] COMMAND...

It imports the standard library only, so that it starts in milliseconds. It must be started as the leader of a new
session, so that everything the command starts is in its process group.

The guard may be killed itself together with its owner, since Ray kills the children of a worker that ends. A second
process therefore waits for that.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

POLL_S = 0.5  # between two checks that the owner lives
GRACE_S = 10.0  # for the command to end after SIGTERM, before the group is killed
ENDED = " ended with status "  # written to the log, after the command's name, if the command ended by itself


def _start_substitute(owner: int, folders: list[str]) -> None:
    """Start a process that does the guard's work if the guard is killed.

    An owner that is still alive then kills that process by its mark and removes the folders itself.
    """
    guard, owner_ends = os.getpid(), os.pidfd_open(owner)
    if os.fork() != 0:
        os.close(owner_ends)
        return
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    while os.getppid() == guard:
        time.sleep(POLL_S)
    os.setsid()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(guard, signal.SIGKILL)
    select.select([owner_ends], [], [])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main(owner: int, folders: list[str], command: list[str], die_with_parent: Callable[[], None]) -> None:
    """Run ``command`` until it ends, the owner ends, or SIGTERM comes; then kill the whole process group.

    After SIGTERM the command gets ``GRACE_S`` to end. After the owner's end it is killed at once, because the owner's
    successor needs the memory.
    """
    asked_to_stop = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what Ctrl-C means
    with contextlib.suppress(ProcessLookupError):  # the owner has ended already; the loop below notices it
        _start_substitute(owner, folders)
    # The parent-death signal comes when the starting thread ends, which is the guard's main thread here.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    while process.poll() is None and not asked_to_stop and os.getppid() == owner:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    if process.poll() is None and asked_to_stop:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # a stopped process handles SIGTERM only after it continues
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
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # verl may not be importable in this interpreter
    from prctl import die_with_parent

    main(int(sys.argv[1]), sys.argv[2].split(os.pathsep), sys.argv[3:], die_with_parent)
