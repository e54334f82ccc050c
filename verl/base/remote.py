"""Remote file systems (``s3://``, ``gs://``, ``hdfs://`` ...) through fsspec, and copies of their files here.

Where a server is, and who may read from it, say the environment variables and files of each driver: for s3fs those of
AWS (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``~/.aws``).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.base.requirements import install_command
from verl.errors import DataError, VerlError

REMOTE = "://"  # in a URL, and in no path of this machine
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Protocol → the extra of verl that installs its driver; that of ``hdfs`` is part of pyarrow."""
_LIBRARIES = {
    "botocore.exceptions": "BotoCoreError",
    "aiohttp": "ClientError",
    "gcsfs.retry": "HttpError",
    "google.auth.exceptions": "GoogleAuthError",
}
"""Modules of drivers whose errors are no ``OSError``, and the base class of these."""


def is_remote(path: str) -> bool:
    """Return whether ``path`` is the URL of a remote file, as in ``s3://bucket/file``; ``file://`` is local."""
    return REMOTE in path and not path.startswith("file://")


def driver_problem(url: str) -> str | None:
    """Return why URLs like this one cannot be reached from here: no such protocol, or no driver; None if they can."""
    if not is_remote(url):
        return None
    import fsspec

    protocol = url.partition(REMOTE)[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        return f"there is no file system {protocol}://"
    except ImportError as error:
        remedy = install_command(EXTRAS[protocol]) if protocol in EXTRAS else str(error)
        return f"its driver is not installed: {remedy}"
    return None


def file_system(url: str, **kwargs: object) -> tuple[Any, str]:
    """Return fsspec's file system of a URL or local path, and the path in it; ``kwargs`` are for the file system.

    Raises:
        DataError: the file system is unknown, its driver is not installed, or it cannot be reached.
    """
    import fsspec

    if problem := driver_problem(url):
        raise DataError(f"{url} cannot be reached: {problem}.")
    with reaching(url):
        return fsspec.core.url_to_fs(url, **kwargs)


@contextmanager
def reaching(url: str, error_class: type[VerlError] = DataError) -> Iterator[None]:
    """Turn errors of the driver in the block into an ``error_class`` that names the URL."""
    try:
        yield
    except VerlError:
        raise
    except _failures() as error:
        hint = " hdfs:// needs CLASSPATH, HADOOP_HOME and JAVA_HOME." if url.startswith("hdfs") else ""
        raise error_class(f"{url} cannot be reached: {type(error).__name__}: {error}.{hint}") from error


def expand(url: str) -> list[str]:
    """Return the URLs of the files that a URL with ``*``, ``?`` or ``[`` matches, sorted; another one as it is.

    Raises:
        DataError: nothing matches.
    """
    if not any(sign in url for sign in "*?["):
        return [url]
    files, path = file_system(url)
    with reaching(url):
        paths = sorted(files.unstrip_protocol(name) for name in files.glob(path))
    if not paths:
        raise DataError(f"nothing matches {url}.")
    return paths


def version(url: str) -> str:
    """Return a checksum of what a file system tells about the file or folder: names, sizes, and times or entity tags.

    Raises:
        DataError: nothing is there, or it cannot be reached.
    """
    files, path = file_system(url)
    with reaching(url):
        files.invalidate_cache()
        if not files.exists(path):
            raise DataError(f"{url} does not exist.")
        details = files.find(path, detail=True) if files.isdir(path) else {path: files.info(path)}
        keys = [(name, files.ukey(name)) for name in sorted(details)]
    return hashlib.sha256(repr(keys).encode()).hexdigest()[:16]


def fetch(url: str, target: Path) -> None:
    """Copy a remote file or folder to ``target``, which appears whole or not at all.

    Raises:
        DataError: it cannot be reached or copied, or a copy has another size than the file.
    """
    files, path = file_system(url)
    partial = target.with_name(target.name + ".partial")
    with reaching(url):
        is_folder = files.isdir(path)
        files.get(path, str(partial), recursive=is_folder)
        sizes = {name: files.size(name) for name in (files.find(path) if is_folder else [path])}
    for name, size in sizes.items():
        copy = partial / name.removeprefix(path).lstrip("/") if is_folder else partial
        if not copy.is_file() or copy.stat().st_size != size:
            raise DataError(f"{copy} is no whole copy of {files.unstrip_protocol(name)}, which has {size} bytes.")
    partial.replace(target)


def _failures() -> tuple[type[BaseException], ...]:
    loaded = ((sys.modules.get(module), name) for module, name in _LIBRARIES.items())
    return (OSError, ImportError, ValueError, *(getattr(module, name) for module, name in loaded if module is not None))
