"""A memory cgroup for each run, where this account may create one.

The kernel then counts all memory of a run together, also its own: page tables, mappings, pipes, locks. Elsewhere only
what :mod:`verl.plugins.sandbox.watch` samples is bounded.

In version 1 the group is below that of this process. In version 2 a group with processes of its own cannot limit groups
below it, so there it is beside it, below the nearest group that hands on the controller (``cgroup.subtree_control``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from verl.plugins.sandbox.types import Limits, SandboxError

MIB = 1 << 20
ROOT = Path("/sys/fs/cgroup")
JOIN = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
"""Shell script that puts itself in a group and becomes another program."""
REMOVAL_S = 5.0
"""How long the kernel may take to forget the ended processes of a group."""
NAME = "verl-sandbox"


class MemoryGroup:
    """A group of processes whose memory is bounded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def joining(self, command: list[str]) -> list[str]:
        """Command that starts ``command`` in the group."""
        return ["/bin/sh", "-c", JOIN, str(self.folder), *command]

    def ran_out(self) -> bool:
        """Whether the kernel ended a process at the limit."""
        version_2, version_1 = self.folder / "memory.events", self.folder / "memory.oom_control"
        events = dict(
            line.split() for line in (version_2 if version_2.exists() else version_1).read_text().splitlines()
        )
        return int(events.get("oom_kill", 0)) > 0


@contextlib.contextmanager
def memory_group(limits: Limits) -> Iterator[MemoryGroup | None]:
    """Create the group of a run; None if this account may not.

    Its limit is that of the run and of its files, which are in memory.
    """
    parent = _parent()
    if parent is None:
        yield None
        return
    with _created(parent, (limits.memory_mb + 2 * limits.max_files_mb) * MIB) as group:
        yield group


@contextlib.contextmanager
def _created(parent: Path, limit: int) -> Iterator[MemoryGroup]:
    # A process that was killed leaves its groups behind, and its pid may come again.
    folder = parent / f"{NAME}-{os.getpid()}-{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        _set_limit(folder, limit)
        yield MemoryGroup(folder)
    finally:
        _remove(folder)


def _set_limit(folder: Path, limit: int) -> None:
    # Names of version 2 and 1 of cgroups; without swap in the kernel the second of each does not exist.
    for name, value in (
        ("memory.max", limit), ("memory.swap.max", 0), ("memory.limit_in_bytes", limit),
        ("memory.memsw.limit_in_bytes", limit),
    ):  # fmt: skip
        if (folder / name).exists():
            (folder / name).write_text(str(value))


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + REMOVAL_S
    while True:
        try:
            folder.rmdir()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SandboxError(f"the memory cgroup {folder} of an ended run cannot be removed: {error}") from error
        time.sleep(0.002)


@functools.cache
def _parent() -> Path | None:
    """Folder in which a process of this account can create and join groups."""
    parent = next((folder for folder in _candidates() if _is_usable(folder)), None)
    if parent is not None:
        _remove_leftovers(parent)
    return parent


def _remove_leftovers(parent: Path) -> None:
    """Remove empty groups of processes that have been killed."""
    for folder in parent.glob(f"{NAME}-*"):
        if not Path(f"/proc/{folder.name.split('-')[2]}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _candidates() -> Iterator[Path]:
    """Yield the memory cgroup of this process, and those above it, of either version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = ROOT / controllers
            folder = top / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _is_usable(folder: Path) -> bool:
    subtree = folder / "cgroup.subtree_control"
    if subtree.exists() and "memory" not in subtree.read_text().split():
        return False
    try:
        with _created(folder, 64 * MIB) as group:
            has_limit = any((group.folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes"))
            return has_limit and subprocess.run(group.joining(["/bin/true"]), capture_output=True).returncode == 0
    except OSError:
        return False
