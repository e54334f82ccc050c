"""Memory, CPU time and number of all processes of a sandboxed run, read from /proc."""

# Not by psutil, which goes over all processes of the machine to find the children of one: on a large machine that is
# too slow for a sample every 20 ms.

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes of a page, the unit of memory in /proc
TICK = os.sysconf("SC_CLK_TCK")  # ticks of a second, the unit of CPU time in /proc
FILE_BYTES = 1024
"""Approximate kernel memory of an empty file or folder, in bytes."""
MOST = 4096
"""Most processes counted in one sample; the kernel's limit keeps a run far below it."""


@dataclass
class RunUsage:
    """Largest sampled values of one run.

    Args:
        init: pid, outside the sandbox, of process 1 of the run's pid namespace, the ancestor of all its processes.
    """

    init: int
    peak_memory: int = 0
    """Bytes: resident memory and page tables of all processes, and ``FILE_BYTES`` for each of their files."""
    peak_tasks: int = 0
    """Concurrent processes and threads."""
    cpu_s: float = 0.0
    """CPU time of the process that used most."""

    def sample(self, memory_limit: int) -> None:
        """Take a sample.

        Args:
            memory_limit: bytes above which the more exact but slower measure of memory is used.
        """
        pids = descendants(self.init)
        usages = [usage for pid in pids if (usage := _usage(pid))]
        memory = sum(usage.resident for usage in usages)
        # Resident sizes count pages shared by forks several times; the proportional size (PSS) counts each once.
        if memory > memory_limit and len(usages) > 1:
            memory = sum(_proportional(pid) for pid in pids)
        # 60,000 mappings of the zero page, far apart, take nothing that is resident and half a GiB of page tables.
        memory += sum(map(_page_tables, pids))
        if pids:
            memory += FILE_BYTES * _names(pids[0])
        self.peak_memory = max(self.peak_memory, memory)
        self.peak_tasks = max(self.peak_tasks, sum(usage.threads for usage in usages))
        self.cpu_s = max([self.cpu_s, *(usage.cpu_s for usage in usages)])


def descendants(pid: int) -> list[int]:
    """Pids of all descendants of a process."""
    pids, waiting = [], [pid]
    while waiting and len(pids) < MOST:
        children = _children(waiting.pop())
        pids += children
        waiting += children
    return pids


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(p) for t in threads for p in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended meanwhile


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


def _page_tables(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmPTE:"))


def _names(pid: int) -> int:
    """Number of files, folders and links in a run's /tmp and /dev/shm; 0 if this account may not read it."""
    count = 0
    for folder in ("tmp", "dev/shm"):
        try:
            system = os.statvfs(f"/proc/{pid}/root/{folder}")
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
