"""Code that runs inside vLLM's processes: the loading of new weights, and the check of each request's token."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from verl_engine import TOKEN_VARIABLE, weights_in_files, with_checksums

_OPEN_PATHS = ("/health",)


class WeightLoader:
    """Load weights from files; a mix-in of vLLM's worker (``worker_extension_cls``)."""

    reload_weights: Callable[..., None]
    add_lora: Callable[..., bool]

    def load_weight_files(self, paths: list[str]) -> dict[str, Any]:
        """Replace all weights by those of safetensors files; return ``{"checksums": {name: checksum}}`` of these."""
        found: dict[str, str] = {}
        self.reload_weights(weights_iterator=with_checksums(weights_in_files(paths), found))
        return {"checksums": found}

    def load_adapters(self, name: str, number: int, folder: str) -> dict[str, Any]:
        """Replace the LoRA adapters of that name by those in a folder of peft; return the checksums of their files."""
        from vllm.lora.request import LoRARequest

        self.add_lora(LoRARequest(name, number, folder, load_inplace=True))
        found: dict[str, str] = {}
        for _ in with_checksums(weights_in_files(map(str, Path(folder).glob("*.safetensors"))), found):
            pass
        return {"checksums": found}


class RequireToken:
    """ASGI middleware that requires the token on all paths but ``/health``, also those that vLLM leaves open."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ[TOKEN_VARIABLE]}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Pass a request with the token on; answer 401 to others."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b'{"error": "the token of this server is missing"}'})
                return
        await self.app(scope, receive, send)
