"""A web server on loopback, in a thread of this process, with a key for each trajectory."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from verl.plugins.endpoint.app import endpoint_app
from verl.plugins.endpoint.calls import CallRefusedError, ModelBackend
from verl.tools.loopback import LoopbackServer

REMEMBERED = 10_000
"""Ended trajectories that are remembered: their late calls get another error than an unknown key."""


@dataclass(frozen=True)
class Access:
    """Address and key by which a client reaches the model."""

    root: str
    """URL without ``/v1``, as Anthropic's client takes it."""
    api_key: str = field(repr=False)

    @property
    def base_url(self) -> str:
        """URL with ``/v1``, as OpenAI's client takes it."""
        return f"{self.root}/v1"


@dataclass(frozen=True)
class _ServedTrajectory:
    """Digest of the key of a running trajectory, and its backend."""

    digest: bytes
    backend: ModelBackend


class TrajectoryEndpoint:
    """The endpoint of a process: each trajectory has a URL and a key of its own.

    A call without the key of its URL gets the status 401, one after the end of its trajectory 410.
    """

    def __init__(self) -> None:
        self._served: dict[str, _ServedTrajectory] = {}
        self._ended: OrderedDict[str, bytes] = OrderedDict()
        """Digest of the key of each ended trajectory."""
        self.server = LoopbackServer(endpoint_app(self._find))

    @contextmanager
    def access(self, backend: ModelBackend) -> Iterator[Access]:
        """Serve a backend under a new URL and key, as long as the context is open."""
        name, key = secrets.token_hex(8), f"sk-verl-{secrets.token_urlsafe(24)}"
        served = self._served[name] = _ServedTrajectory(_digest(key), backend)
        try:
            yield Access(f"{self.server.url}/{name}", key)
        finally:
            self._ended[name] = served.digest
            del self._served[name]
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def close(self) -> None:
        """End the server."""
        self.server.close()

    def _find(self, name: str, key: str) -> ModelBackend:
        served, digest = self._served.get(name), _digest(key)
        if served is not None and hmac.compare_digest(served.digest, digest):
            return served.backend
        if hmac.compare_digest(self._ended.get(name, b""), digest):
            raise CallRefusedError("this trajectory has ended, and its calls are answered no more.", status=410)
        raise CallRefusedError("this URL and this key do not belong together.", status=401, code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
