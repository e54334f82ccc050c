"""Write files durably, record their size and checksum, and replace folders atomically.

A crash, also of the whole machine, may come at any moment. So a file counts only once its bytes and its name are
synced, and a folder gets its final name only when all of its files are.
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
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_CHUNK = 1 << 22  # bytes read at once

UNREADABLE = (
    OSError, EOFError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, struct.error,
    pickle.UnpicklingError,
)  # fmt: skip
"""Exceptions of ``torch.load`` for a damaged file; its unpickler assumes that PyTorch wrote the file."""


@dataclass(frozen=True)
class FileEntry:
    """Expected size and checksum of a file."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal."""


class DurableFile(io.RawIOBase):
    """A new file, written sequentially; hashes while writing and syncs on close."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")
        self._sum = hashlib.sha256()
        self._size = 0
        self.problem: OSError | None = None
        """The first write error, kept because ``torch.save`` raises an error of its own in its place."""

    def writable(self) -> bool:
        """Always true."""
        return True

    def write(self, data: Buffer) -> int:
        """Write all of ``data`` and return its length."""
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
        """Size and checksum of what was written."""
        return FileEntry(self._size, self._sum.hexdigest())


def write_bytes(path: Path, data: bytes) -> FileEntry:
    """Write a small file and sync it."""
    with DurableFile(path) as file:
        file.write(data)
    return file.entry


def write_state(path: Path, state: object) -> FileEntry:
    """Write tensors, numbers and strings as a ``.pt`` file and sync it; a full disk is an ``OSError``."""
    with DurableFile(path) as file:
        try:
            import torch

            torch.save(state, cast("IO[bytes]", file))
        except RuntimeError as error:
            raise file.problem or error from error
    return file.entry


def write_states(folder: Path, states: Mapping[str, object]) -> dict[str, FileEntry]:
    """Write one ``.pt`` file into ``folder`` for each name, which may have folders before it."""
    for name in states:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return {name: write_state(folder / name, state) for name, state in states.items()}


def sync_tree(folder: Path) -> dict[str, FileEntry]:
    """Sync the files that another library wrote into ``folder``; return them by relative path."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.relative_to(folder).as_posix()] = entry_of(path)
    sync_folder(folder)
    return sizes


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entry_of(path: Path) -> FileEntry:
    """Compute size and checksum of an existing file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees the old content or the new, never a part."""
    partial = path.with_suffix(".partial")
    write_bytes(partial, text.encode())
    partial.replace(path)
    sync_folder(path.parent)


# ---- folders that appear whole -------------------------------------------------------------------

PARTIAL, REPLACED = ".partial", ".replaced"


class NewFolder:
    """A folder that is written under a temporary name, then renamed to ``path``, replacing what is there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self.partial = self.path.with_name(self.path.name + PARTIAL)

    def begin(self) -> Path:
        """Create the empty temporary folder; leftovers of an interrupted save are removed."""
        put_back(self.path)
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)
        return self.partial

    def commit(self) -> None:
        """Sync the folder's entries and rename it to its final path.

        After a crash between the two renames the old folder has a temporary name; :func:`put_back` restores it.
        """
        for folder in [path for path in self.partial.rglob("*") if path.is_dir()] + [self.partial]:
            sync_folder(folder)
        old = self.path.with_name(self.path.name + REPLACED)
        if self.path.exists():
            self.path.rename(old)
        self.partial.rename(self.path)
        sync_folder(self.path.parent)
        if old.exists():
            _remove(old)

    def discard(self) -> None:
        """Remove what was written but not committed, ignoring errors."""
        shutil.rmtree(self.partial, ignore_errors=True)


def put_back(path: Path) -> None:
    """Repair an interrupted :meth:`NewFolder.commit`: restore the old folder's name, or remove it if replaced."""
    old = path.with_name(path.name + REPLACED)
    if not old.exists():
        return
    if path.exists():
        _remove(old)
    else:
        old.rename(path)
        sync_folder(path.parent)


def _remove(old: Path) -> None:
    """Remove a replaced folder; a failure (on NFS while it is being read) costs only disk space."""
    try:
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old)
    except OSError as error:
        logger.warning("%s was replaced and cannot be removed: %s", old, error)
