"""The messages by which the processes of a transfer agree: JSON in a key-value store, with an end for all of them."""

from __future__ import annotations

import datetime
import json
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from verl.errors import RolloutError

_CHECK_INTERVAL = datetime.timedelta(seconds=0.5)
"""Interval at which a waiting process checks whether the transfer was given up."""
_MAX_NAP_S = 2e-3
"""Longest pause between two checks of a transfer under way; pauses double up to it."""
_LIMIT = datetime.timedelta(minutes=1)
"""Timeout of a connection or request, which are answered at once; the workers' calls limit the longer waits."""
_FAILED = "failed"
_in_process: dict[str, dist.Store] = {}
"""Stores of transfers whose sender and receiver are this process."""


@dataclass(frozen=True)
class StoreAddress:
    """Address of a transfer's store; without a port it is a store inside the process of both sides."""

    host: str
    port: int | None
    session: str
    """Name of all transfers over one set of connections."""

    def connect(self, timeout_s: float = _LIMIT.total_seconds()) -> dist.Store:
        """Return a client of the store, whose requests have this limit too.

        Raises:
            RolloutError: the process that serves it cannot be reached.
        """
        if self.port is None:
            if self.session not in _in_process:
                _in_process.clear()  # of earlier sessions
                _in_process[self.session] = dist.HashStore()
            return _in_process[self.session]
        limit = datetime.timedelta(seconds=timeout_s)
        try:
            return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=limit)
        except dist.DistError as error:
            raise _lost(error) from error


def serve_store(host: str) -> dist.TCPStore:
    """Serve a store from this process, at any free port, until the object is deleted."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_LIMIT)


class Link:
    """Messages of one transfer, by key.

    Args:
        store: that all its processes are connected to.
        transfer: name of this transfer, which no other one over the same store has.
    """

    def __init__(self, store: dist.Store, transfer: str) -> None:
        self.store = store
        self.transfer = transfer
        self._written: list[str] = []

    def write(self, key: str, message: object) -> None:
        """Store a message under a key, for all processes that read it."""
        self._written.append(self._scoped(key))
        try:
            self.store.set(self._scoped(key), json.dumps(message))
        except dist.DistError as error:
            raise _lost(error) from error

    def read(self, key: str) -> Any:
        """Wait for a message and return it.

        Raises:
            RolloutError: the transfer was given up, or the process that serves the store was lost.
        """
        while True:
            try:
                self.store.wait([self._scoped(key)], _CHECK_INTERVAL)
                return json.loads(self.store.get(self._scoped(key)))
            except dist.DistNetworkError as error:
                raise _lost(error) from error
            except dist.DistStoreError:  # not yet
                self.check()

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective.

        Raises:
            RolloutError: it failed, or the transfer was given up.
        """
        nap_s, checked_at = 1e-5, time.monotonic()
        while not work.is_completed():
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _MAX_NAP_S)
            if time.monotonic() - checked_at > _CHECK_INTERVAL.total_seconds():
                self.check()
                checked_at = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:  # gloo and NCCL raise no narrower one
            raise RolloutError(f"the transfer of weights was cut off: {error}") from error

    def check(self) -> None:
        """Raise RolloutError if the transfer was given up."""
        try:
            is_failed = self.store.check([self._scoped(_FAILED)])
        except dist.DistError as error:
            raise _lost(error) from error
        if is_failed:
            raise RolloutError(
                "the transfer of weights was given up, because it failed in another process, whose error says why."
            )

    def give_up(self) -> None:
        """Make every process that waits in this transfer raise."""
        self.write(_FAILED, True)

    def forget(self) -> None:
        """Delete the messages that this process wrote; all have read them."""
        for key in self._written:
            self.store.delete_key(key)

    def _scoped(self, key: str) -> str:
        return f"{self.transfer}/{key}"


def _lost(error: Exception) -> RolloutError:
    return RolloutError(f"the process that sends the weights cannot be reached; it may be lost: {error}")
