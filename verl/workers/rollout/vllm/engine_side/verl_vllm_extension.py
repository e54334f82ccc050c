"""Runs inside vLLM's processes: takes new weights and says what arrived; lets nobody in without the token.

This folder is put on the module path of the server, whose environment need not have verl: only PyTorch,
safetensors and the standard library may be imported here.
"""

from __future__ import annotations

import hmac
import importlib.util
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from torch import Tensor

TOKEN_VARIABLE = "VERL_ENGINE_TOKEN"
_OPEN_PATHS = ("/health",)


def _load_checksum() -> Callable[[Tensor], int]:
    path = Path(__file__).parents[2] / "checksum.py"
    spec = importlib.util.spec_from_file_location("verl_checksum", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.checksum


def with_checksums(weights: Iterable[tuple[str, Tensor]], found: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The same weights; the checksum of each is in ``found`` when it has passed."""
    checksum = _load_checksum()
    for name, tensor in weights:
        found[name] = str(checksum(tensor))
        yield name, tensor


class WeightLoader:
    """Mixed into vLLM's worker (``worker_extension_cls``)."""

    reload_weights: Callable[..., None]

    def load_weight_files(self, paths: list[str]) -> dict[str, Any]:
        """Replace all weights by those of safetensors files.

        Returns:
            ``{"checksums": {name: checksum}}`` of what was handed to the model.
        """
        from safetensors import safe_open

        def weights() -> Iterator[tuple[str, Tensor]]:
            for path in paths:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in file.keys():
                        yield name, file.get_tensor(name)

        found: dict[str, str] = {}
        self.reload_weights(weights_iterator=with_checksums(weights(), found))
        return {"checksums": found}


class RequireToken:
    """ASGI middleware: every request but that for health must bear the token, also those that vLLM leaves open."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ[TOKEN_VARIABLE]}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b'{"error": "the token of this server is missing"}'})
                return
        await self.app(scope, receive, send)
