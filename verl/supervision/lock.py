"""A lock that lets only one run write into a folder; the kernel releases it when its holder dies."""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from verl.errors import CheckpointError

logger = logging.getLogger(__name__)

NAME = "run.lock"


class FolderLock:
    """Lock of a folder against other processes, held from ``acquire`` to ``release`` or the end of this process.

    Several objects of one process share the lock of a folder; the last one releases it. A process that is forked
    meanwhile does not hold it.

    The lock is ``flock(2)`` on the file ``run.lock``, so it cannot become stale; the text in the file only names the
    holder for error messages. On NFS it works between machines if the mount supports locks (NFSv4; not with
    ``nolock`` or ``local_lock=flock``). On a file system without locks, ``acquire`` only warns.

    Args:
        folder: created if missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).expanduser().resolve() / NAME
        self._held: FileLock | None = None

    def acquire(self, wait_s: float = 5.0) -> None:
        """Take the lock, unless this object holds it already.

        Args:
            wait_s: how long to wait for a holder that is about to end.

        Raises:
            CheckpointError: another run, named in the message, holds the lock, or the folder cannot be written.
        """
        if self._held is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as error:
            raise CheckpointError(
                f"cannot write to the checkpoint folder {self.path.parent}: {error}. Name a writable folder "
                "(default_local_dir)."
            ) from error
        # fallback_to_soft would use the existence of a file as the lock, which a killed run leaves behind.
        lock = FileLock(
            self.path, is_singleton=True, thread_local=False, fallback_to_soft=False, on_acquired=_write_holder
        )
        try:
            lock.acquire(timeout=wait_s)
        except Timeout as error:
            raise CheckpointError(
                f"another run writes into {self.path.parent}: {_holder(self.path)}. Two runs in one folder would "
                "overwrite each other's checkpoints. Give this one another folder (default_local_dir, or "
                "experiment_name; output_dir of a call of Python), or end the other one first."
            ) from error
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s), so nothing keeps another run from writing there.", self.path, error
            )
        self._held = lock

    def release(self) -> None:
        """Release the lock; later calls do nothing."""
        # The file is not removed: another process could lock the removed file while a third one creates a new one.
        if self._held is not None:
            self._held.release()
        self._held = None

    close = release  # for contextlib.closing

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _write_holder(descriptor: int) -> None:
    now = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode(), 0)


def _holder(path: Path) -> str:
    try:
        about = json.loads(path.read_text())
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not written its name"
