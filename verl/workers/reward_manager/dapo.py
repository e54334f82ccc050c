"""The reward manager of DAPO: scores, and a soft penalty for responses that are nearly too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.registry import suggest
from verl.utils.reward_score.length import soft_overlong_penalty
from verl.workers.reward_manager.function import Scores, tensors_of
from verl.workers.reward_manager.naive import NaiveRewardManager, on_last_token
from verl.workers.reward_manager.registry import register

KEY = "reward_model.reward_kwargs.overlong_buffer_cfg"


@dataclass(frozen=True)
class OverlongBuffer:
    """Settings of the penalty: the last ``len`` tokens before the longest response, and how much it costs there."""

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0
    log: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None, max_resp_len: int | None) -> OverlongBuffer:
        """The settings, checked.

        Raises:
            ConfigError: one is unknown or out of its bounds.
        """
        given = {name: value for name, value in (settings or {}).items() if value is not None}
        known = list(cls.__dataclass_fields__)
        if unknown := [name for name in given if name not in known]:
            hint = suggest(unknown[0], known)
            raise ConfigError(f"{KEY}.{unknown[0]} is unknown.{hint} There are {', '.join(known)}.")
        buffer = cls(**given)
        if not buffer.enable:
            return buffer
        if max_resp_len is None or max_resp_len < 1:
            raise ConfigError(
                f"{KEY}.enable=true needs the longest response: max_resp_len={max_resp_len}. "
                "Set reward_model.reward_kwargs.max_resp_len=${data.max_response_length}."
            )
        if not isinstance(buffer.len, int) or not 0 <= buffer.len <= max_resp_len:
            raise ConfigError(
                f"{KEY}.len={buffer.len} must be a number of tokens from 0 to max_resp_len={max_resp_len}."
            )
        if not buffer.penalty_factor >= 0:
            raise ConfigError(f"{KEY}.penalty_factor={buffer.penalty_factor} must be at least 0; it is subtracted.")
        return buffer


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Scores every response, and adds the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13).

    A result that is a number is also reported as ``acc``. The score that is reported is the function's; the
    penalty is added to the last token's reward alone, and reported with ``overlong_buffer_cfg.log``.

    Args:
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        compute_score: as for :class:`NaiveRewardManager`.
        reward_fn_key: column that says which scorer a sample belongs to.
        max_resp_len: longest response, in tokens.
        overlong_buffer_cfg: ``enable``, ``len``, ``penalty_factor``, ``log``.
        settings: further arguments of :class:`NaiveRewardManager`.

    Raises:
        ConfigError: a setting of the penalty is wrong.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.buffer = OverlongBuffer.of(overlong_buffer_cfg, max_resp_len)
        self.max_resp_len = max_resp_len or 0
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **settings)

    def shaped(self, data: DataProto, scores: Scores) -> Scores:
        """Scores and penalties; a sample that could not be scored has none."""
        assert scores.tokens is not None
        samples = [
            score if score.extra or score.status != "ok" else replace(score, extra={"acc": score.value})
            for score in scores.samples
        ]
        if not self.buffer.enable:
            return Scores(samples, scores.tokens)
        tensors = tensors_of(data)
        lengths = tensors["attention_mask"][:, -tensors["responses"].size(1) :].sum(-1).tolist()
        penalties = [
            overlong_penalty(length, self.max_resp_len, self.buffer.len, self.buffer.penalty_factor)
            if score.status == "ok"
            else 0.0
            for length, score in zip(lengths, samples, strict=True)
        ]
        if self.buffer.log:
            samples = [
                replace(score, extra={**score.extra, "overlong_reward": penalty, "overlong": penalty < 0})
                if score.status == "ok"
                else score
                for score, penalty in zip(samples, penalties, strict=True)
            ]
        return Scores(samples, scores.tokens + on_last_token(tensors["response_mask"], penalties))


def overlong_penalty(length: int, longest: int, buffer: int, factor: float) -> float:
    """What a response loses for its length (arXiv:2503.14476, eq. 13, times ``factor``), from ``-factor`` to 0.

    With ``buffer`` 0 only responses above ``longest`` lose, and all of it.

    >>> [overlong_penalty(length, longest=10, buffer=4, factor=2.0) for length in (6, 8, 9, 10, 12)]
    [0.0, -1.0, -1.5, -2.0, -2.0]
    """
    if buffer == 0:
        return -factor if length > longest else 0.0
    return soft_overlong_penalty(length, longest, buffer, factor)
