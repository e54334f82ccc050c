"""Counter of the kernel's out-of-memory kills, to distinguish them from a SIGKILL by another process."""

from __future__ import annotations

import functools
from pathlib import Path

ROOT = Path("/")


def oom_kills(root: Path = ROOT) -> int:
    """Number of processes that the kernel has killed for lack of memory in this process's control group.

    Without control groups, the number of the whole machine, which also counts unrelated processes; 0 where the
    kernel has neither, as outside Linux.

    Args:
        root: root of the file system, for tests.
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
    """Files that may have the counter, the most exact one first; see cgroups(7)."""
    kills = []
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
        kills += [mount / path.strip("/") / name, mount / name]
    return (*kills, root / "proc/vmstat")
