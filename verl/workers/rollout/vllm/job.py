"""One response on its way through vLLM, and what both ways of driving it share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl.workers.rollout.base import FinishReason


@dataclass
class Job:
    """A request, and what has been drawn for it so far."""

    prompt_ids: list[int]
    params: dict[str, Any]
    """Arguments of vLLM's ``SamplingParams``."""
    is_stop: Callable[[list[int]], bool] | None = None
    """Whether the last of the tokens completes a stop text; None: there are no stop texts."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    is_done: bool = False
    """The response has ended, or was given up by the engine."""

    def take(self, token_ids: Sequence[int], log_probs: Sequence[float], finish_reason: str | None) -> bool:
        """Further tokens from the engine; true when the response has ended and no more are wanted."""
        for token, log_prob in zip(token_ids, log_probs, strict=True):
            self.token_ids.append(token)
            self.log_probs.append(log_prob)
            if self.is_stop is not None and self.is_stop(self.token_ids):
                self.finish_reason = "stop"
                self.is_done = True
                return True
        if finish_reason == "stop" or finish_reason == "length":
            self.finish_reason = finish_reason
        self.is_done = finish_reason is not None
        return self.is_done


class Engine(Protocol):
    """vLLM itself, wherever it runs."""

    def generate(self, jobs: list[Job], aborted: Any) -> None:
        """Fill in the jobs; returns soon after the event ``aborted`` is set."""

    def load_weights(self, weights: Any, name: str) -> int:
        """Replace all weights, and forget what was computed from older ones; the number of their bytes.

        Raises:
            RolloutError: they did not arrive as they were sent.
        """
        ...

    def sleep(self) -> None:
        """Give back the memory of weights, keys and values."""

    def wake(self, tags: list[str] | None) -> None:
        """Take it again: all, or that of ``weights`` or ``kv_cache``."""

    def kill(self) -> Path | None:
        """End all processes of the engine, dead or alive; a copy of its log if there is one."""
        ...
