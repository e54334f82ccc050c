"""Reward managers for external services: with rate limits, or with a user's HTTP service as the scorer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.scorers import default_compute_score
from verl.scorers.remote import RemoteScorer
from verl.supervision.killable_pool import RateLimit, unwrapped
from verl.workers.reward_manager.abstract import register
from verl.workers.reward_manager.function import Form, RewardSample
from verl.workers.reward_manager.naive import NaiveRewardManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@register("limited")
class RateLimitedRewardManager(NaiveRewardManager):
    """Scores with rate limits, for functions (best async) that call an external service.

    The limits hold over all processes of this manager. The timeout of a sample does not include its wait for a
    free slot. Rates are kept second by second: unused calls are not saved for a burst.

    Args:
        compute_score: a per-sample function.
        max_concurrent: concurrent calls. A function that is not async also needs as many ``num_workers``.
        max_rpm: calls per minute; None is no limit.
        max_tpm: tokens per minute; None is no limit.
        estimated_tokens_per_request: tokens that one call counts towards ``max_tpm``.
        settings: arguments of :class:`NaiveRewardManager`, as are those not listed here.

    Raises:
        ConfigError: a limit is not positive.
    """

    forms: tuple[Form, ...] = ("sample",)

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., object] | None = None,
        reward_fn_key: str = "data_source",
        max_concurrent: int = 1,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        estimated_tokens_per_request: float = 2000,
        **settings: Any,
    ) -> None:
        limits = {
            "max_concurrent": max_concurrent,
            "max_rpm": max_rpm,
            "max_tpm": max_tpm,
            "estimated_tokens_per_request": estimated_tokens_per_request,
        }
        for name, value in limits.items():
            if value is not None and not value > 0:
                raise ConfigError(
                    f"reward_model.reward_kwargs.{name}={value} must be positive; leave it out for no limit."
                )
        self.max_rpm, self.max_tpm = max_rpm, max_tpm
        self.estimated_tokens_per_request = estimated_tokens_per_request
        super().__init__(
            tokenizer, num_examine, compute_score, reward_fn_key, max_concurrent=max_concurrent, **settings
        )

    def limits(self) -> Sequence[RateLimit]:
        """Limits of calls and of tokens per minute."""
        requests = [RateLimit(self.max_rpm)] if self.max_rpm else []
        return requests + ([RateLimit(self.max_tpm, counts_tokens=True)] if self.max_tpm else [])

    def tokens(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        """``estimated_tokens_per_request`` for each."""
        return [self.estimated_tokens_per_request] * len(samples)


@register("remote")
class RemoteRewardManager(NaiveRewardManager):
    """Posts each sample to an HTTP service, which returns the score (see :mod:`verl.scorers.remote`).

    Args:
        compute_score: must be unset, since the service scores.
        url: address of the service.
        headers: HTTP headers of every request.
        max_retries: attempts after the first, for status 429, 500, 502, 503, 504, timeouts and connection errors.
        request_timeout_s: timeout of one request; None is half of ``timeout_s``.
        timeout_s: timeout of a sample, all attempts included.
        settings: arguments of :class:`NaiveRewardManager`, as are those not listed here; ``max_concurrent`` bounds
            concurrent requests.

    Raises:
        ConfigError: there is no url, or a reward function was chosen as well.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., object] | None = None,
        reward_fn_key: str = "data_source",
        url: str = "",
        headers: Mapping[str, str] | None = None,
        max_retries: int = 3,
        request_timeout_s: float | None = None,
        timeout_s: float = 30.0,
        **settings: Any,
    ) -> None:
        if compute_score is not None and unwrapped(compute_score) is not default_compute_score:
            raise ConfigError(
                "the reward manager remote takes its scores from a service, and a reward function was chosen as well. "
                "Leave the function out (custom_reward_function.path, reward_format), or choose another manager."
            )
        scorer = RemoteScorer(url, headers, max_retries, request_timeout_s or timeout_s / 2)
        super().__init__(tokenizer, num_examine, scorer, reward_fn_key, timeout_s=timeout_s, **settings)
