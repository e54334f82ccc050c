"""A policy that says what a test wants."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from verl.workers.rollout.request import RolloutOutput, RolloutRequest

END = "<eos>"


class Call:
    """An answer that is there at once."""

    def __init__(self, output: RolloutOutput) -> None:
        self._future: Future[RolloutOutput] = Future()
        self._future.set_result(output)

    def future(self) -> Future[RolloutOutput]:
        return self._future

    def cancel(self) -> None:
        pass


class Script:
    """Engines whose policy says given texts, one a turn; a text too long for its turn is cut as an engine cuts it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.begin([])

    def begin(self, texts: list[str]) -> None:
        self._texts = iter(texts)
        self.prompts: list[list[int]] = []

    def send(self, conversation: str, request: RolloutRequest, on_part: object = None) -> Call:
        self.prompts.append(list(request.prompt_ids))
        ids = self._tokenizer(next(self._texts) + END, add_special_tokens=False)["input_ids"]
        most = request.sampling.max_tokens
        cut, reason = ids[:most], "length" if len(ids) > most else "stop"
        return Call(RolloutOutput(cut, [-0.25] * len(cut), reason, 7))

    def end(self, conversation: str) -> None:
        pass
