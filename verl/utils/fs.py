"""Files that may lie elsewhere: local paths as they are, remote ones (``s3://``, ``hdfs://`` ...) through fsspec."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from verl.errors import ConfigError, DataError

_REMOTE = "://"
LONGEST_NAME = 240
"""Bytes; file systems take 255, and endings are added."""


def is_remote(path: str) -> bool:
    """Whether ``path`` names a file system, as in ``s3://bucket/file``; ``file://`` is local."""
    return _REMOTE in path and not path.startswith("file://")


def below(folder: Path, *names: str) -> Path:
    """``folder / name / ...``, for names that come from a configuration, a data file or a service.

    Raises:
        ConfigError: a name leads out of the folder, or is none.
    """
    for name in names:
        if problem := name_problem(name):
            raise ConfigError(f"{name!r:.120} cannot be a name below {folder}: {problem}.")
    return folder.joinpath(*names)


def name_problem(name: str) -> str | None:
    """Why a text cannot be part of a path that stays below its folder; None if it can. ``a/b`` can."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\0" in name:
        return "it is empty" if not name else "it begins with /" if name.startswith("/") else "it holds a NUL"
    if any(part in (".", "..") for part in parts):
        return "it leads out of the folder"
    if any(len(part.encode(errors="replace")) > LONGEST_NAME for part in parts):
        return f"it is longer than the {LONGEST_NAME} bytes that a file name may have"
    return None


def copy_to_local(src: str, cache_dir: str | None = None, verbose: bool = False) -> str:
    """A local path that holds what ``src`` names: a file or a folder.

    A local ``src`` is returned with ``~`` and environment variables filled in, and not copied. A remote one
    is copied to ``cache_dir`` once; a later call finds the copy. So nobody else should be able to write there.

    Args:
        src: a path or a URL.
        cache_dir: where copies go; None takes ``verl/files`` below ``XDG_CACHE_HOME`` or ``~/.cache``.
        verbose: accepted for scripts that pass it; copying is silent.

    Raises:
        DataError: the remote file system is unknown, or there is nothing at ``src``.
        ConfigError: ``src`` ends in no name.
    """
    if not is_remote(src):
        return os.path.expandvars(str(Path(src.removeprefix("file://")).expanduser()))
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl" / "files"
    root = Path(cache_dir).expanduser() if cache_dir else own
    target = below(root / hashlib.sha256(src.encode()).hexdigest()[:16], Path(src.rstrip("/")).name)
    if target.exists():
        return str(target)
    _fetch(src, target)
    return str(target)


def _fetch(src: str, target: Path) -> None:
    import fsspec

    partial = target.with_name(target.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        files, path = fsspec.core.url_to_fs(src)
        if not files.exists(path):
            raise DataError(f"there is nothing at {src}.")
        files.get(path, str(partial), recursive=files.isdir(path))
    except (ImportError, ValueError) as error:
        raise DataError(f"{src} cannot be read: {error}. Install the fsspec driver of its file system.") from error
    except OSError as error:
        raise DataError(f"{src} cannot be copied to {target}: {error}.") from error
    partial.replace(target)
