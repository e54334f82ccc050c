"""The reward manager for functions that score a whole batch in one call."""

from __future__ import annotations

from verl.workers.reward_manager.function import Form
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Scores a batch with one call, for functions that work on many responses at once.

        compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list
        compute_reward(data: DataProto, **kwargs) -> Tensor

    The list has a number or a dict with ``score`` for each sample. The call has ``batch_timeout_s`` and
    ``memory_limit_mb`` for all samples together; if it fails, all of them fail.

    Raises:
        ConfigError: the function scores single samples.
    """

    forms: tuple[Form, ...] = ("texts", "batch")
