"""The reward manager that asks a service of yours for scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.errors import ConfigError
from verl.utils.killable_pool import unwrapped
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.remote import RemoteScorer
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register


@register("remote")
class RemoteRewardManager(NaiveRewardManager):
    """Posts each sample to a service and takes its answer as the score (see :mod:`verl.utils.reward_score.remote`).

    Args:
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        compute_score: none; the service scores.
        reward_fn_key: column that says which scorer a sample belongs to.
        url: where to post.
        headers: of every request.
        max_retries: how often a request is tried again that met 429, 5xx or a broken connection.
        request_timeout_s: how long one request may take; None is half of ``timeout_s``, which bounds all attempts.
        timeout_s: how long a sample may take.
        settings: further arguments of :class:`NaiveRewardManager`; ``max_concurrent`` is how many requests may be
            under way at once.

    Raises:
        ConfigError: there is no url, or a reward function was chosen as well.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
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
                "reward_manager=remote takes its scores from a service, and a reward function was chosen as well. "
                "Leave out custom_reward_function.path and reward_model.reward_format, or choose another manager."
            )
        scorer = RemoteScorer(url, headers, max_retries, request_timeout_s or timeout_s / 2)
        super().__init__(tokenizer, num_examine, scorer, reward_fn_key, timeout_s=timeout_s, **settings)
