"""Files that are on the disk when a call returns, and what is known of each: its size and its sum.

A crash may come at any moment, also one of the whole machine. So a file counts only once its bytes and its
name are synced, and a folder changes its name only when all of its files are.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

logger = logging.getLogger(__name__)

_CHUNK = 1 << 22

UNREADABLE = (
    OSError, EOFError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, struct.error,
    pickle.UnpicklingError,
)  # fmt: skip
"""What ``torch.load`` raises for a damaged file: its unpickler takes a file for one that PyTorch has written."""


@dataclass(frozen=True)
class FileEntry:
    """What a file must be."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal."""


class DurableFile(io.RawIOBase):
    """A new file to write from start to end, that adds up its sum on the way and is on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")
        self._sum = hashlib.sha256()
        self._size = 0
        self.problem: OSError | None = None
        """The first error of a write, which a library that writes into this file may hide behind one of its own."""

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """All of ``data``; its length."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.problem = self.problem or error
            raise
        self._sum.update(view)
        self._size += view.nbytes
        return view.nbytes

    def close(self) -> None:
        """Sync and close."""
        if not self.closed:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
                super().close()

    @property
    def entry(self) -> FileEntry:
        """Size and sum of what was written."""
        return FileEntry(self._size, self._sum.hexdigest())


def write_bytes(path: Path, data: bytes) -> FileEntry:
    """A small file, synced."""
    with DurableFile(path) as file:
        file.write(data)
    return file.entry


def write_state(path: Path, state: Any) -> FileEntry:
    """Tensors, numbers and strings as a ``.pt`` file, synced.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    with DurableFile(path) as file:
        try:
            torch.save(state, cast("IO[bytes]", file))
        except RuntimeError as error:
            raise file.problem or error from error
    return file.entry


def write_states(folder: Path, states: Mapping[str, Any]) -> dict[str, FileEntry]:
    """One ``.pt`` file for each name, into ``folder``."""
    return {name: write_state(folder / name, state) for name, state in states.items()}


def sync_tree(folder: Path) -> dict[str, FileEntry]:
    """Sync what another library wrote into ``folder``; the files by their path below it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[path.relative_to(folder).as_posix()] = entry_of(path)
    sync_folder(folder)
    return found


def sync_folder(folder: Path) -> None:
    """Let the names in ``folder`` outlive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entry_of(path: Path) -> FileEntry:
    """Size and sum of a file that is there."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_suffix(".partial")
    write_bytes(partial, text.encode())
    partial.replace(path)
    sync_folder(path.parent)


REPLACED = ".replaced"


def replace_folder(new: Path, place: Path) -> None:
    """Rename ``new`` to ``place``; a folder that is there makes room, and goes when the new one has the name.

    Between the two renames a crash leaves the old one beside its place, where :func:`put_back` finds it.
    """
    old = place.with_name(place.name + REPLACED)
    if place.exists():
        place.rename(old)
    new.rename(place)
    sync_folder(place.parent)
    if old.exists():
        _remove(old)


def put_back(place: Path) -> None:
    """Finish what a crash of :func:`replace_folder` left: the old folder gets its name again, or goes."""
    old = place.with_name(place.name + REPLACED)
    if not old.exists():
        return
    if place.exists():
        _remove(old)
    else:
        old.rename(place)
        sync_folder(place.parent)


def _remove(old: Path) -> None:
    """What nobody needs any more: if it stays, as on NFS while somebody reads it, that costs space only."""
    try:
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old)
    except OSError as error:
        logger.warning("%s was replaced and cannot be removed: %s", old, error)
