"""The reward manager for services that take only so many calls or tokens per minute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.utils.killable_pool import RateLimit
from verl.workers.reward_manager.function import Form, Sample
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register


@register("limited")
class RateLimitedRewardManager(NaiveRewardManager):
    """Scores no faster than a service allows; for functions that call one, best async.

    The limits hold over all processes of this manager and also when one of them is killed and replaced.
    The time of a sample begins with its call, not while it waits for its turn. A rate is kept from
    second to second: nothing is saved up for a burst.

    Args:
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        compute_score: a per-sample function.
        reward_fn_key: column that says which scorer a sample belongs to.
        max_concurrent: calls under way at once. A function that is not async also needs as many ``num_workers``.
        max_rpm: calls per minute; None is no limit.
        max_tpm: tokens per minute; None is no limit.
        estimated_tokens_per_request: what one call counts towards ``max_tpm``.
        settings: further arguments of :class:`NaiveRewardManager`.

    Raises:
        ConfigError: a limit is not positive.
    """

    forms: tuple[Form, ...] = ("sample",)

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_concurrent: int = 1,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        estimated_tokens_per_request: float = 2000,
        **settings: Any,
    ) -> None:
        given = {
            "max_concurrent": max_concurrent,
            "max_rpm": max_rpm,
            "max_tpm": max_tpm,
            "estimated_tokens_per_request": estimated_tokens_per_request,
        }
        for name, value in given.items():
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
        """Calls and tokens per minute."""
        requests = [RateLimit(self.max_rpm)] if self.max_rpm else []
        return requests + ([RateLimit(self.max_tpm, counts_tokens=True)] if self.max_tpm else [])

    def tokens(self, samples: Sequence[Sample]) -> Sequence[float]:
        """``estimated_tokens_per_request`` for each."""
        return [self.estimated_tokens_per_request] * len(samples)
