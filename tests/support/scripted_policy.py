"""An engine that draws the texts of a script, for tests of what talks to a policy.

connection = ScriptedEngine(tokenizer, lambda prompt: "It is 42.")
policy = scripted_policy(connection)
await policy.generate("a", prompt_ids=..., sampling_params={"max_tokens": 8})
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verl.agents.policy import AsyncLLMServerManager, SampleId
from verl.config import RolloutConfig
from verl.vision.prompts import ImagePrompts
from verl.workers.rollout.request import DrawnPart, RolloutOutput, RolloutRequest, SamplingParams


class ScriptedEngine:
    """Answers each request with the text that a function makes of the prompt's text.

    It draws a token for each character and each control token: others than the tokenizer makes of the text. Each token
    has a log-prob of its own, in [-1, 0).

    Args:
        tokenizer: of the policy.
        script: makes the text of a turn of the prompt's text; None leaves the request without an answer.
    """

    def __init__(self, tokenizer: Any, script: Callable[[str], str | None]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.requests: list[RolloutRequest] = []
        self.waiting: list[ScriptedCall] = []
        """Requests without an answer that were not cancelled."""
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._pieces = re.compile("|".join([*map(re.escape, added), "."]), re.DOTALL)

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> ScriptedCall:
        """See :class:`verl.agents.policy.Connection`. A response that streams is told token by token."""
        call = ScriptedCall(self, on_part)
        with self._sending:
            self.requests.append(request)
            text = self.script(self.tokenizer.decode(request.prompt_ids))
            if text is None:
                self.waiting.append(call)
            else:
                output = self.draw(text, request.sampling)
                call.tell(output.token_ids)
                call.settle(output)
        return call

    def end(self, conversation: str) -> None:
        """Do nothing: nothing is kept for further turns."""

    def draw(self, text: str, sampling: SamplingParams) -> RolloutOutput:
        """Draw a text, as far as the request allows."""
        ids: list[int] = []
        for piece in self._pieces.findall(text):
            ids += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            if any(stop in self.tokenizer.decode(ids) for stop in sampling.stop):
                break
        else:
            ids.append(self.tokenizer.eos_token_id)
        is_cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        log_probs = [-((next(self._numbers) % 1024) + 1) / 1024 for _ in ids]
        return RolloutOutput(ids, log_probs, "length" if is_cut else "stop", 0)


class ScriptedCall:
    """A request under way."""

    def __init__(self, engine: ScriptedEngine, on_part: Callable[[DrawnPart], object] | None = None) -> None:
        self._engine, self._on_part = engine, on_part
        self._told = 0
        self._future: Future[RolloutOutput] = Future()

    def future(self) -> Future[RolloutOutput]:
        return self._future

    def tell(self, token_ids: list[int]) -> None:
        """Tell the next tokens of the response, one after the other, if it streams."""
        for token in token_ids:
            if self._on_part is not None:
                self._on_part(DrawnPart(self._told, [token]))
            self._told += 1

    def settle(self, output: RolloutOutput) -> None:
        self._future.set_result(output)

    def cancel(self) -> None:
        self._future.cancel()
        if self in self._engine.waiting:
            self._engine.waiting.remove(self)


def scripted_policy(
    engine: ScriptedEngine, images: ImagePrompts | None = None, **settings: Any
) -> AsyncLLMServerManager:
    """The policy of one trajectory; ``images`` reads those that it is shown, ``settings`` are of ``rollout``."""
    config = RolloutConfig(**({"prompt_length": 512, "response_length": 2048} | settings))
    sampling = SamplingParams(max_tokens=config.response_length, seed=0, temperature=config.temperature)
    return AsyncLLMServerManager(config, engine, SampleId(step=1, uid="a", sample_index=0), sampling, images=images)
