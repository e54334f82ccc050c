"""Reward manager of DAPO, with a soft penalty for responses near the length limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl.base.registry import suggest
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.scorers.parts import soft_overlong_penalty
from verl.workers.policy_turns import own_tokens
from verl.workers.reward_manager.abstract import register
from verl.workers.reward_manager.function import tensors_of
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.scores import Scores, on_last_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "overlong_buffer_cfg"


@dataclass(frozen=True)
class OverlongBuffer:
    """Settings of the soft overlong penalty."""

    enable: bool = False
    len: int = 0
    """Number of tokens below the longest response over which the penalty grows from 0 to ``penalty_factor``."""
    penalty_factor: float = 1.0
    log: bool = False
    """Report the penalty of each sample."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any] | None, max_resp_len: int | None) -> OverlongBuffer:
        """Read and check the settings.

        Raises:
            ConfigError: one is unknown or out of its bounds.
        """
        configured = {name: value for name, value in (settings or {}).items() if value is not None}
        names = list(cls.__dataclass_fields__)
        if unknown := [name for name in configured if name not in names]:
            hint = suggest(unknown[0], names)
            raise ConfigError(f"{KEY}.{unknown[0]} is unknown.{hint} There are {', '.join(names)}.")
        buffer = cls(**configured)
        if not buffer.enable:
            return buffer
        if max_resp_len is None or max_resp_len < 1:
            raise ConfigError(
                f"{KEY}.enable=true needs the longest response: max_resp_len={max_resp_len}. "
                "Set it to the number of tokens that a response may have, max_response_length."
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

    If the function returns only a number, it is also reported as ``acc``. The reported ``score`` is without the
    penalty, which is added to the last token's reward; ``overlong_buffer_cfg.log`` reports it separately. The length
    of a response is the number of tokens that the policy wrote: results of tools and messages of users do not count.

    Args:
        max_resp_len: longest response, in tokens.
        overlong_buffer_cfg: settings of :class:`OverlongBuffer`.
        settings: arguments of :class:`NaiveRewardManager`, as are those not listed here.

    Raises:
        ConfigError: a setting of the penalty is wrong.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., object] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, object] | None = None,
        **settings: Any,
    ) -> None:
        self.overlong_buffer_cfg = OverlongBuffer.from_settings(overlong_buffer_cfg, max_resp_len)
        self.max_resp_len = max_resp_len or 0
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **settings)

    def shaped(self, data: DataProto, scores: Scores) -> Scores:
        """Add the penalties; a sample that could not be scored gets none."""
        assert scores.tokens is not None
        samples = [
            score if score.extra or score.status != "ok" else replace(score, extra={"acc": score.value})
            for score in scores.samples
        ]
        if not self.overlong_buffer_cfg.enable:
            return Scores(samples, scores.tokens)
        lengths = own_tokens(data).sum(-1).tolist()
        penalties = [
            overlong_penalty(
                length, self.max_resp_len, self.overlong_buffer_cfg.len, self.overlong_buffer_cfg.penalty_factor
            )
            if score.status == "ok"
            else 0.0
            for length, score in zip(lengths, samples, strict=True)
        ]
        if self.overlong_buffer_cfg.log:
            samples = [
                replace(score, extra={**score.extra, "overlong_reward": penalty, "overlong": penalty < 0})
                if score.status == "ok"
                else score
                for score, penalty in zip(samples, penalties, strict=True)
            ]
        return Scores(samples, scores.tokens + on_last_token(tensors_of(data)["response_mask"], penalties))


def overlong_penalty(length: int, longest: int, buffer: int, factor: float) -> float:
    """Soft overlong penalty (arXiv:2503.14476, eq. 13, times ``factor``), from ``-factor`` to 0.

    With ``buffer`` 0 it is ``-factor`` for responses longer than ``longest``, else 0.

    >>> [overlong_penalty(length, longest=10, buffer=4, factor=2.0) for length in (6, 8, 9, 10, 12)]
    [0.0, -1.0, -1.5, -2.0, -2.0]
    """
    if buffer == 0:
        return -factor if length > longest else 0.0
    return soft_overlong_penalty(length, longest, buffer, factor)
