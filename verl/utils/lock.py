"""One run for a folder: a lock that the kernel gives back when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from verl.errors import CheckpointError

logger = logging.getLogger(__name__)

NAME = "run.lock"

_held: dict[Path, tuple[int, int]] = {}
"""Of this process: the descriptor of each lock, and how many hold it."""


def _forget() -> None:
    """In a forked child: its copy of the descriptor would keep the lock when the run is long dead."""
    while _held:
        _, (descriptor, _) = _held.popitem()
        with contextlib.suppress(OSError):
            os.close(descriptor)


os.register_at_fork(after_in_child=_forget)


class FolderLock:
    """Keeps other processes from writing into a folder, from ``acquire`` to ``release`` or the end of this one.

    Several objects of one process share the lock of a folder; it is given back with the last of them.

    The lock is ``flock(2)`` on the file ``run.lock``, so there is none that is stale: what the file says of its
    holder is for people. On NFS it holds between machines where the mount has locks (NFSv4; not with ``nolock``
    or ``local_lock=flock``); a file system without locks is a warning, and nothing is held.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).expanduser().resolve() / NAME
        self._is_held = False

    def acquire(self, wait_s: float = 5.0) -> None:
        """Take the lock; nothing to do if this object holds it.

        Args:
            wait_s: how long a holder that is about to end is waited for.

        Raises:
            CheckpointError: another run holds it, named in the message, or the folder cannot be written.
        """
        if self._is_held:
            return
        descriptor, holders = _held.get(self.path) or (self._open(wait_s), 0)
        _held[self.path] = descriptor, holders + 1
        self._is_held = True

    def _open(self, wait_s: float) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to the checkpoint folder {self.path.parent}: {error}. Set trainer.default_local_dir to "
                "a writable folder."
            ) from error
        if not self._flock(descriptor, wait_s):
            holder = _holder(descriptor)
            os.close(descriptor)
            raise CheckpointError(
                f"another run writes into {self.path.parent}: {holder}. Two runs in one folder would overwrite each "
                "other's checkpoints. Give this one another trainer.default_local_dir (or trainer.experiment_name), "
                "or end the other one first."
            )
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(about).encode(), 0)
        return descriptor

    def _flock(self, descriptor: int, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.05)
            except OSError as error:
                logger.warning(
                    "%s cannot be locked (%s), so nothing keeps another run from writing there.", self.path, error
                )
                return True
            else:
                return True

    def release(self) -> None:
        """Let others in; later calls do nothing. The file stays: to remove it could let two runs in."""
        if self._is_held and self.path in _held:  # a forked child has forgotten it
            descriptor, holders = _held.pop(self.path)
            if holders > 1:
                _held[self.path] = descriptor, holders - 1
            else:
                os.close(descriptor)
        self._is_held = False

    close = release
    """For ``contextlib.closing``: to give back, at the end of a block, what was taken somewhere in it."""

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")


def _holder(descriptor: int) -> str:
    try:
        about = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not written its name"
