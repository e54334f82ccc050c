"""An OpenAI-compatible endpoint over a tiny model, in the forms in which servers give log-probs of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.tools.loopback import LoopbackServer


@dataclass
class CompletionsServer:
    """A server of a model.

    Attributes:
        model: what is served.
        tokenizer: its tokenizer.
        form: how it gives log-probs of prompts: as vLLM, as OpenAI with ``echo``, or not at all.
        key: what it asks for.
        failures: statuses with which it answers the next calls.
        bodies: what it was sent.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    form: Literal["prompt_logprobs", "echo", "none"] = "prompt_logprobs"
    key: str = ""
    failures: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve at the URL that is given."""
        server = LoopbackServer(Starlette(routes=[Route("/v1/completions", self.answer, methods=["POST"])]))
        try:
            yield f"{server.url}/v1"
        finally:
            server.close()

    async def answer(self, request: Request) -> JSONResponse:
        if self.key and request.headers["authorization"] != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "Incorrect API key provided"}}, 401)
        if self.failures:
            return JSONResponse({"error": {"message": "overloaded"}}, self.failures.pop())
        body = await request.json()
        self.bodies.append(body)
        return JSONResponse({"object": "text_completion", "choices": [{"index": 0, "text": "?"} | self.scores(body)]})

    @torch.no_grad()
    def scores(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        log_probs = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        texts = [self.tokenizer.decode([token]) for token in ids]
        if self.form == "prompt_logprobs" and "prompt_logprobs" in body:
            places: list[dict[str, Any] | None] = [None]
            for token, row in zip(ids[1:], log_probs[:-1], strict=True):
                ranked = row.argsort(descending=True).tolist()
                shown = dict.fromkeys([token, *ranked[: body["prompt_logprobs"]]])
                places.append(
                    {
                        str(i): {
                            "logprob": float(row[i]),
                            "rank": ranked.index(i) + 1,
                            "decoded_token": self.tokenizer.decode([i]),
                        }
                        for i in shown
                    }
                )
            return {"prompt_logprobs": places}
        if self.form == "echo" and body.get("echo"):
            rows = zip(ids[1:], log_probs[:-1], strict=True)
            values = [None, *(float(row[token]) for token, row in rows), -0.5]  # and that of the token that is drawn
            return {"logprobs": {"tokens": [*texts, "?"], "token_logprobs": values}}
        return {"logprobs": None}
