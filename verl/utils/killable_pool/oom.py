"""How many processes the kernel has killed because memory was up: what tells its SIGKILL from anybody else's."""

from __future__ import annotations

import functools
from pathlib import Path

ROOT = Path("/")


def oom_kills(root: Path = ROOT) -> int:
    """Of the control group that this process is in; where there is none, of the whole machine.

    The group's count holds its own processes alone, whether the group's limit or the machine's memory was up; the
    machine's count also rises when a stranger is killed. 0 where the kernel has neither, as outside Linux.

    Args:
        root: of the file system to look in.
    """
    for file in _counters(root):
        try:
            lines = file.read_text().splitlines()
        except OSError:  # a kernel or a container without it
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


@functools.cache
def _counters(root: Path) -> tuple[Path, ...]:
    """Files that may have the count, the most exact one first; see cgroups(7)."""
    found = []
    groups = root / "sys/fs/cgroup"
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        memberships = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if not controllers:  # version 2
            mount, name = groups, "memory.events.local"
        elif "memory" in controllers.split(","):
            mount, name = groups / "memory", "memory.oom_control"
        else:
            continue
        # In a container, the mount often begins at the group itself, whatever its path is outside.
        found += [mount / path.strip("/") / name, mount / name]
    return (*found, root / "proc/vmstat")
