"""The scorer of :mod:`.math_reward` in the form of a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.reward_score import math_reward


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
    **settings: Any,
) -> list[float]:
    """The score of each response by :func:`.math_reward.compute_score`; sources and extras are not looked at.

    Args:
        data_sources: one per response.
        solution_strs: the responses.
        ground_truths: their answers.
        extra_infos: one per response.
        settings: of :func:`.math_reward.compute_score`.

    Raises:
        RewardError: a ground truth cannot be read.
        ValueError: as many truths as responses are needed.
    """
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [math_reward.compute_score(text, truth, **settings) for text, truth in pairs]
