"""Local copies of remote files (``s3://``, ``hdfs://`` ...) through fsspec, and safe paths below a folder."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from verl.base.remote import fetch, is_remote, version
from verl.errors import ConfigError

logger = logging.getLogger(__name__)

LONGEST_NAME = 240  # bytes; file systems allow 255, and suffixes are added
_COPY_OF = ".verl-copy-of"  # file beside a copy with the path or URL of what was copied


def below(folder: Path, *names: str) -> Path:
    """Return ``folder / name / ...`` for untrusted names, e.g. from a configuration, a data file or a service.

    Raises:
        ConfigError: a name leads out of the folder, or is not a valid file name.
    """
    for name in names:
        if problem := name_problem(name):
            raise ConfigError(f"{name!r:.120} cannot be a name below {folder}: {problem}.")
    return folder.joinpath(*names)


def name_problem(name: str) -> str | None:
    """Return why a name cannot be a path below a folder; None if it can. ``a/b`` can."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\0" in name:
        return "it is empty" if not name else "it begins with /" if name.startswith("/") else "it holds a NUL"
    if any(part in (".", "..") for part in parts):
        return "it leads out of the folder"
    if any(len(part.encode(errors="replace")) > LONGEST_NAME for part in parts):
        return f"it is longer than the {LONGEST_NAME} bytes that a file name may have"
    return None


def is_private(path: Path, may_be_written: bool = False) -> bool:
    """Return whether a file or folder belongs to this account or root, is no link, and no other account may write it.

    Args:
        path: what is checked, without the folders above it.
        may_be_written: only check the owner and that it is no link.
    """
    return is_private_status(path.lstat(), may_be_written)


def is_private_status(status: os.stat_result, may_be_written: bool = False) -> bool:
    """See :func:`is_private`; of the status of a file that is open already, so that it cannot be exchanged."""
    is_closed = may_be_written or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (os.getuid(), 0) and not stat.S_ISLNK(status.st_mode) and is_closed


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """Return a local path of the file or folder ``src``, downloading it if it is remote.

    A local path is returned with ``~`` and environment variables expanded. A remote one is copied to ``cache_dir``
    once and found there by later calls, so other users should not have write access to that folder; what has changed
    at ``src`` is copied again, beside the earlier copy.

    Args:
        src: a path or a URL.
        cache_dir: default is ``verl/files`` below ``XDG_CACHE_HOME`` or ``~/.cache``.
        filelock: name of the lock file beside the copy, so that one of several processes copies.
        verbose: log the copying.
        always_recopy: copy a remote file again, although it is there unchanged.
        use_shm: copy a local file or folder on into shared memory (/dev/shm) if it fits there, else only warn; names
            that do not exist locally, such as those of models on the hub, are returned as they are.

    Raises:
        DataError: the remote file system is unknown or cannot be reached, or nothing exists at ``src``.
        ConfigError: the URL does not end in a file name.
    """
    if not is_remote(src):
        local = os.path.expandvars(str(Path(src.removeprefix("file://")).expanduser()))
        return in_shared_memory(local, filelock) if use_shm else local
    root = Path(cache_dir).expanduser() if cache_dir else own_copies()
    named = below(root / hashlib.sha256(src.encode()).hexdigest()[:16], Path(src.rstrip("/")).name)
    target = named.parent / version(src) / named.name
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(target.parent / filelock):
        if always_recopy and target.exists():
            _remove(target)
        if not target.exists():
            if verbose:
                logger.warning("copying %s to %s", src, target)
            partial = target.with_name(target.name + ".partial")
            if partial.exists():  # of a process that was ended
                _remove(partial)
            fetch(src, target)
        _write_source(target, src)
    return in_shared_memory(str(target), filelock) if use_shm else str(target)


def own_copies() -> Path:
    """The folder of copies of remote files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl" / "files"


def in_shared_memory(path: str, filelock: str = ".file.lock", shared: Path = Path("/dev/shm")) -> str:
    """Copy a file or folder into shared memory once and return its path there; if it does not fit, only warn.

    What does not exist locally, or does not fit, is returned as it is. The copy stays until the machine restarts.
    """
    source = Path(path)
    if not source.exists():
        return path
    if not shared.is_dir():
        logger.warning("there is no shared memory at %s: %s is read where it is.", shared, path)
        return path
    files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
    user_folder = shared / f"verl-{os.getuid()}"
    folder = user_folder / name_of_state(source, files)
    target = folder / source.name
    needed, free = sum(file.stat().st_size for file in files), shutil.disk_usage(shared).free
    if not target.exists() and needed > free:
        logger.warning("%s has %d bytes and %s %d free: it is read where it is.", path, needed, shared, free)
        return path
    for level in (user_folder, folder, target):
        try:
            if level != target:
                level.mkdir(exist_ok=True, mode=0o700)
            # Everybody may make folders in shared memory. The modes of the copy's files are those of their source.
            is_own = not os.path.lexists(level) or is_private(level, may_be_written=level == target)
        except FileExistsError:  # no folder, or a link that leads nowhere
            is_own = False
        if not is_own:
            logger.warning("others may write %s: %s is read where it is. Remove it.", level, path)
            return path
    with _locked(folder / filelock):
        if not target.exists():
            partial = target.with_name(target.name + ".partial")
            if partial.exists():
                _remove(partial)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, partial)
            partial.replace(target)
        _write_source(target, path)
    return str(target)


def name_of_state(source: Path, files: Sequence[Path]) -> str:
    """Return a name for what is at a path now: other sizes or times of its files give another name."""
    stats = [(str(file), status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return hashlib.sha256(repr([str(source.resolve()), *stats]).encode()).hexdigest()[:16]


def make_once(target: Path, source: Path, write: Callable[[Path], None]) -> None:
    """Let one of several processes write the folder ``target`` from ``source``; it is there whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(target.parent / ".file.lock"):
        if target.exists():
            return
        partial = target.with_name(target.name + ".partial")
        if partial.exists():  # of a process that was ended
            _remove(partial)
        write(partial)
        partial.replace(target)
        _write_source(target, str(source))


def source_of(path: str) -> str:
    """Return the path or URL that ``path`` was copied from; ``path`` itself if verl did not copy it.

    Files that leave the machine or outlive the copy must name this, not the copy.
    """
    record = Path(path).parent / _COPY_OF
    if not record.is_file() or not is_private(record, may_be_written=True):  # others may write beside a path of a user
        return path
    return source_of(record.read_text())  # in shared memory may lie a copy of a copy


def _write_source(copy: Path, source: str) -> None:
    record = copy.parent / _COPY_OF
    if not record.is_file() or record.read_text() != source:
        new = record.with_name(f"{_COPY_OF}.new")  # other processes read without the lock
        new.write_text(source)
        new.replace(record)


def _locked(path: Path) -> AbstractContextManager[object]:
    from filelock import FileLock  # here, because every command imports this module and few copy a file

    return FileLock(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
