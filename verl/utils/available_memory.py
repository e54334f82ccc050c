"""How much memory this process may still take: of the machine, and of the control groups that it is in."""

from __future__ import annotations

from pathlib import Path

import psutil

ROOT = Path("/")

_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By version of cgroups(7): the limit, what is used, and in ``memory.stat`` the part of it that is given up first."""


def available_memory(root: Path = ROOT) -> int:
    """Bytes that are free, or file cache that the system gives up when asked.

    In a container the machine may have more than the container's limit lets it take; the smaller counts.

    Args:
        root: of the file system in which the groups are looked up.
    """
    return min([psutil.virtual_memory().available, *_rooms(root)])


def _rooms(root: Path) -> list[int]:
    """What is left in each control group with a limit: that of this process, and those around it."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a system without control groups
        return []
    groups = root / "sys/fs/cgroup"
    rooms = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, mount = (1, groups / "memory") if controllers else (2, groups)
        # In a container, the mount often begins at the group itself, whatever its path is outside.
        own = mount / path.strip("/")
        folders = [own, *(folder for folder in own.parents if folder.is_relative_to(mount))]
        rooms += [room for folder in folders if (room := _room(folder, *_FILES[version])) is not None]
    return rooms


def _room(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """None for a group without a limit, or without its files."""
    try:
        most, taken = (folder / limit).read_text().strip(), int((folder / used).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if most == "max":
        return None
    return max(0, int(most) - taken + int(stat.get(cache, 0)))
