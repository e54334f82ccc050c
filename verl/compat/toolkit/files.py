"""Make folders and copy files, on local paths and on URLs (``hdfs://``, ``s3://`` ...) through fsspec."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from verl.base.fs import copy_to_local
from verl.base.remote import file_system, is_remote


def exists(path: str, **kwargs: object) -> bool:
    """Return whether there is a file or a folder at ``path``; ``kwargs`` go to the remote file system."""
    files, place = _file_system(path, **kwargs)
    return files.exists(place)


def resolve_config_path(config_path: str) -> str:
    """Return the absolute path of a file of a configuration, relative ones below the working folder.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(config_path).expanduser().absolute()
    if not path.exists():
        raise FileNotFoundError(f"there is no {config_path} (looked for {path}); give a path of a file that exists.")
    return str(path)


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: object) -> None:
    """Create a folder and its parents. ``mode`` counts for local folders only.

    Raises:
        FileExistsError: it is there, and not ``exist_ok``.
    """
    if not is_remote(name):
        Path(_local(name)).mkdir(mode=mode, parents=True, exist_ok=exist_ok)
        return
    files, place = _file_system(name, **kwargs)
    files.makedirs(place, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """Copy a file, or a folder with all that is in it; either path may be remote. Return True.

    A file is copied into ``dst`` if that is a folder; a local folder is merged into one that is there, unless
    ``dirs_exist_ok=False``. Other ``kwargs`` are for the remote file system.

    Raises:
        FileNotFoundError: there is nothing at ``src``.
        DataError: the file system of a URL is unknown, or its driver is not installed.
    """
    merge = kwargs.pop("dirs_exist_ok", True)
    if not is_remote(src) and not is_remote(dst):
        source, target = _local(src), _local(dst)
        if Path(source).is_dir():
            shutil.copytree(source, target, dirs_exist_ok=merge)
        else:
            shutil.copy(source, target)
        return True
    (files_from, source), (files_to, target) = _file_system(src, **kwargs), _file_system(dst, **kwargs)
    if not files_from.exists(source):
        raise FileNotFoundError(f"{src} does not exist.")
    if files_to.isdir(target) and not files_from.isdir(source):
        target = f"{target.rstrip('/')}/{Path(source).name}"
    if not is_remote(src):
        files_to.put(source, target, recursive=files_from.isdir(source))
    elif not is_remote(dst):
        files_from.get(source, target, recursive=files_from.isdir(source))
    else:
        _between(files_from, source, files_to, target)
    return True


def _between(files_from: Any, source: str, files_to: Any, target: str) -> None:
    """Copy from one remote file system to another, file by file."""
    for path in files_from.find(source) if files_from.isdir(source) else [source]:
        place = target + path.removeprefix(source)
        files_to.makedirs(str(Path(place).parent), exist_ok=True)
        with files_from.open(path, "rb") as reader, files_to.open(place, "wb") as writer:
            shutil.copyfileobj(reader, writer)


def _local(path: str) -> str:
    return str(Path(path.removeprefix("file://")).expanduser())


def _file_system(path: str, **kwargs: object) -> tuple[Any, str]:
    """Return fsspec's file system of ``path``, and the path in it."""
    return file_system(path, **kwargs) if is_remote(path) else file_system(_local(path))


def copy_local_path_from_hdfs(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
) -> str:
    """Return a local path of ``src``, downloading it if it is remote; see :func:`copy_to_local`."""
    return copy_to_local(src, cache_dir, filelock, verbose, always_recopy)


def local_mkdir_safe(path: str) -> str:
    """Create a local folder and its parents, which may be there already; return its absolute path."""
    folder = Path(path).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def is_non_local(path: str) -> bool:
    """Return whether a path is a URL of another machine's file system, such as ``hdfs://``."""
    return is_remote(path)


def md5_encode(path: str) -> str:
    """Return the MD5 sum of a text, 32 hexadecimal digits; a name for a copy, no protection."""
    return hashlib.md5(path.encode(), usedforsecurity=False).hexdigest()


def get_local_temp_path(hdfs_path: str, cache_dir: str) -> str:
    """Return where a copy of a remote file goes: ``cache_dir/<MD5 of its folder>/<its name>``; the folder is made."""
    folder = Path(cache_dir) / md5_encode(hdfs_path)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / os.path.basename(hdfs_path.rstrip("/")))


def verify_copy(src: str, dest: str) -> bool:
    """Return whether a file or folder has the sizes of its copy; files of folders are compared by relative path."""
    return bool(sizes := _sizes(src)) and sizes == _sizes(dest)


def _sizes(path: str) -> dict[str, int]:
    root = Path(path)
    files = [root] if root.is_file() else [file for file in root.rglob("*") if file.is_file()]
    return {str(file.relative_to(root)): file.stat().st_size for file in files}


def copy_to_shm(src: str) -> str:
    """Copy a local file or folder into shared memory (``/dev/shm``), once, and return the path of the copy."""
    return copy_to_local(src, use_shm=True)
