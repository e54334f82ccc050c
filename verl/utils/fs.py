"""Files that may lie elsewhere: local paths as they are, remote ones (``s3://``, ``hdfs://`` ...) through fsspec."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from verl.errors import DataError

_REMOTE = "://"


def is_remote(path: str) -> bool:
    """Whether ``path`` names a file system, as in ``s3://bucket/file``; ``file://`` is local."""
    return _REMOTE in path and not path.startswith("file://")


def copy_to_local(src: str, cache_dir: str | None = None, verbose: bool = False) -> str:
    """A local path that holds what ``src`` names: a file or a folder.

    A local ``src`` is returned with ``~`` and environment variables filled in, and not copied. A remote one
    is copied to ``cache_dir`` once; a later call finds the copy.

    Args:
        src: a path or a URL.
        cache_dir: where copies go; None takes a folder below the system's temporary one.
        verbose: accepted for scripts that pass it; copying is silent.

    Raises:
        DataError: the remote file system is unknown, or there is nothing at ``src``.
    """
    if not is_remote(src):
        return os.path.expandvars(str(Path(src.removeprefix("file://")).expanduser()))
    root = Path(cache_dir or Path(tempfile.gettempdir()) / "verl-cache").expanduser()
    target = root / hashlib.sha256(src.encode()).hexdigest()[:16] / Path(src.rstrip("/")).name
    if target.exists():
        return str(target)
    _fetch(src, target)
    return str(target)


def _fetch(src: str, target: Path) -> None:
    import fsspec

    partial = target.with_name(target.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
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
