"""Inspect and end processes of this machine by process id; imports neither torch nor Ray.

Three ways to end a process with all its descendants:

- :func:`kill_group`, if it leads a process group (``start_new_session=True``) that no descendant leaves;
- :func:`family_of` and :func:`end_processes`, while it lives or its orphans are adopted
  (:func:`verl.supervision.prctl.adopt_orphans`);
- :func:`kill_marked`, in all cases, also if it has ended and its descendants left group and session.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

logger = logging.getLogger(__name__)

STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})  # by SIGSTOP or a debugger

MARK_VARIABLE = "VERL_HELPER_PROCESS"  # environment variable with the value of new_mark()
KILL_S = 10.0  # for killed processes to end: on a busy machine one ends only when it gets a core
_PAUSE_S = 0.01  # between two searches for marked processes
LIFE_EVERY_S = 1.0  # least time between two signs of life


# ---- signs of life --------------------------------------------------------------------------------


@dataclass
class _Life:
    """Signs of life of the call under way in this process, which is limited in how long it is silent."""

    file: Path | None = None
    """Its time, ``time.monotonic()``, tells other processes when the newest sign was."""
    shown_at: float = -math.inf
    """``time.monotonic()`` of the newest sign."""


life = _Life()


def show_life() -> None:
    """Show that the call under way makes progress, such as a token or a pass."""
    if time.monotonic() - life.shown_at > LIFE_EVERY_S:
        life.shown_at = time.monotonic()
        if life.file is not None:
            life.file.touch()
            # Time since the machine started, which all of its processes share: the wall clock may be set meanwhile.
            os.utime(life.file, (life.shown_at, life.shown_at))


# ---- inspection -----------------------------------------------------------------------------------


def state_of(pid: int) -> str:
    """Return the state of a process, one of ``psutil.STATUS_*``; empty if it does not exist or is a zombie."""
    try:
        state = psutil.Process(pid).status()
    except (psutil.Error, ValueError):
        return ""
    return "" if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else state


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return bool(state_of(pid))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP or a debugger; false if it does not exist."""
    return state_of(pid) in STOPPED


def title_of(pid: int) -> str:
    """Return the command line of a process, or the title that it set itself; empty if it does not exist."""
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return ""


def family_of(pid: int) -> list[int]:
    """Return the ids of a process and its descendants, except those below an ended one; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


# ---- ending ---------------------------------------------------------------------------------------


def kill(pid: int) -> bool:
    """Send SIGKILL; return whether the process existed, also as a zombie or without permission to kill it."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill_group(leader: int) -> None:
    """Send SIGKILL to all processes of a group, if it exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_processes(pids: Sequence[int], title: str, patience_s: float = 1.0, timeout_s: float = 10.0) -> list[int]:
    """Wait until processes that were asked to end are gone, and kill those that are late.

    Args:
        pids: process ids.
        title: text in the titles of the processes; a process without it is another one that reuses the id.
        patience_s: time to end before it is killed; a stopped process cannot end and is killed at once.
        timeout_s: time limit in total.

    Returns:
        The processes that still exist, since they hang in the kernel.
    """
    start = time.monotonic()
    left = list(pids)
    while True:
        # An ending process loses its title first, so an empty title does not mean that the id was reused.
        left = [pid for pid in left if is_alive(pid) and (title in title_of(pid) or not title_of(pid))]
        passed = time.monotonic() - start
        if not left or passed > timeout_s:
            return left
        for pid in left:
            if passed > patience_s or is_stopped(pid):
                kill(pid)
        time.sleep(0.02)


def end_program(problem: str, code: int) -> NoReturn:
    """Say what is wrong, end this process at once, from any thread, and kill all of its descendants.

    For a process whose main thread is blocked in C code: nothing is cleaned up, and no exit handler runs.
    """
    if problem:
        os.write(2, f"\n{problem}\n".encode())  # not by logging or sys.stderr, whose locks another thread may hold
    descendants = family_of(os.getpid())[1:]  # parents first, so that they start no further child
    # A shell kills them when the pipe closes, that is after this process has ended: Ray's threads end the process with
    # a code of their own as soon as its raylet is dead.
    ended, _ = os.pipe()
    command = ["sh", "-c", 'read -r _; kill -9 "$@" 2>/dev/null', "sh", *map(str, descendants)]
    try:
        os.posix_spawn("/bin/sh", command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, ended, 0)], setpgroup=0)
    except OSError:  # there is no shell, or no process can be started
        for pid in descendants:
            kill(pid)
    os._exit(code)


# ---- groups ----------------------------------------------------------------------------------------


@contextmanager
def children_in_own_group() -> Iterator[None]:
    """Put the processes that the block starts into a process group of their own; this process returns to its group.

    A signal to the group of this process, as ``timeout`` sends it, then does not reach them. The leader of a group
    cannot leave it, so its children stay in it.
    """
    group = os.getpgrp()
    if group == os.getpid():
        yield
        return
    os.setpgid(0, 0)
    try:
        yield
    finally:
        with suppress(PermissionError):  # all others of the group have ended, so it is gone
            os.setpgid(0, group)


# ---- marks ----------------------------------------------------------------------------------------


def new_mark() -> str:
    """Return a new value of :data:`MARK_VARIABLE`, for a process and its descendants.

    It begins with the mark of this process, if it has one: whoever ends that one ends what is below the new one too.
    """
    outer, mark = os.environ.get(MARK_VARIABLE), secrets.token_hex(16)
    return f"{outer}/{mark}" if outer else mark


def kill_marked(mark: str) -> None:
    """Kill all processes with the mark, or one below it, in their environment and wait until they have ended.

    On Linux only. Every descendant inherits the environment, even if it leaves the process group and session or its
    parent has ended. Logs the processes that still exist after ``KILL_S``.
    """
    deadline = time.monotonic() + KILL_S
    word = f"{MARK_VARIABLE}={mark}".encode()
    empty_rounds = 0
    # Two rounds, because a process has no readable environment for a moment during fork and exec.
    while empty_rounds < 2:
        left = [pid for pid in psutil.pids() if _has_mark(pid, word) and kill(pid)]
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


def _has_mark(pid: int, word: bytes) -> bool:
    # Not with psutil, which takes three times as long: this reads the environment of all processes repeatedly.
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended or belongs to another user
        return False
    return any(entry == word or entry.startswith(word + b"/") for entry in environment.split(b"\0"))
