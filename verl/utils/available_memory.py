"""Memory that this process can still allocate, within the machine and its control groups."""

from __future__ import annotations

from pathlib import Path

import psutil

ROOT = Path("/")

# By version of cgroups(7): the files of limit and usage, and the entry of memory.stat for reclaimable file cache.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(root: Path = ROOT) -> int:
    """Return the available memory in bytes, including file cache that the system can reclaim.

    This is the minimum over the machine and all control groups, such as a container's, that limit this process.
    ``root`` is the root folder below which ``proc`` and ``sys`` are read.
    """
    return min([psutil.virtual_memory().available, *_available_by_group(root)])


def _available_by_group(root: Path) -> list[int]:
    """Available bytes in each control group with a limit: this process's group and its ancestors."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a system without control groups
        return []
    groups = root / "sys/fs/cgroup"
    limits = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, mount = (1, groups / "memory") if controllers else (2, groups)
        # In a container the mount point is often the group itself, although the path is the one outside.
        group_folder = mount / path.strip("/")
        folders = [group_folder, *(folder for folder in group_folder.parents if folder.is_relative_to(mount))]
        limits += [free for folder in folders if (free := _available_in(folder, *_FILES[version])) is not None]
    return limits


def _available_in(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """Available bytes in a control group; None if it has no limit or its files are missing."""
    try:
        most, used_bytes = (folder / limit).read_text().strip(), int((folder / used).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if most == "max":
        return None
    return max(0, int(most) - used_bytes + int(stat.get(cache, 0)))
