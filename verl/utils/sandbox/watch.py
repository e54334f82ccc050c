"""A look at all processes of a run from outside: memory, computing time, number."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")
NAME = 1024
"""Bytes of the kernel's memory that an empty file or folder takes, about."""
MOST = 4096
"""Processes that one look takes in; the kernel's limit keeps a run far below it."""


@dataclass
class Watch:
    """The largest values seen of one run.

    Args:
        init: process 1 of the run's pid namespace, as this machine numbers it; every process of the run
            descends from it.
    """

    init: int
    peak_memory: int = 0
    """Bytes resident in all processes together, and those that the names of files take."""
    peak_tasks: int = 0
    """Processes and threads at once."""
    cpu_s: float = 0.0
    """Of the process that computed most."""

    def look(self, memory_limit: int) -> None:
        """Sum up all processes as they are now.

        Pages that a fork shares are in the resident size of both. So where the cheap sum is above the
        limit, the proportional one (PSS), in which a page counts once, decides.
        """
        pids = descendants(self.init)
        usages = [usage for pid in pids if (usage := _usage(pid))]
        memory = sum(usage.resident for usage in usages)
        if memory > memory_limit and len(usages) > 1:
            memory = sum(_proportional(pid) for pid in pids)
        if pids:
            memory += NAME * _names(pids[0])
        self.peak_memory = max(self.peak_memory, memory)
        self.peak_tasks = max(self.peak_tasks, sum(usage.threads for usage in usages))
        self.cpu_s = max([self.cpu_s, *(usage.cpu_s for usage in usages)])


def descendants(pid: int) -> list[int]:
    """All processes below one, without it."""
    found, waiting = [], [pid]
    while waiting and len(found) < MOST:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process (SIGSTOP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(p) for t in threads for p in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []  # it ended while we looked


class _Usage(NamedTuple):
    resident: int
    threads: int
    cpu_s: float


def _usage(pid: int) -> _Usage | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Places as in proc(5), counted from field 3, which follows the name in brackets.
    return _Usage(int(fields[21]) * PAGE, int(fields[17]), (int(fields[11]) + int(fields[12])) / TICK)


def _names(pid: int) -> int:
    """Files, folders and links that a run has made; 0 where this account may not look."""
    count = 0
    for place in ("tmp", "dev/shm"):
        try:
            system = os.statvfs(f"/proc/{pid}/root/{place}")
        except OSError:  # it has ended, or belongs to another account
            continue
        count += system.f_files - system.f_ffree
    return count


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:
        usage = _usage(pid)
        return usage.resident if usage else 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
