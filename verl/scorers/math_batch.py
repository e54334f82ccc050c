"""Per-batch form of the scorer :mod:`.math_reward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.scorers import math_reward


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[object],
    extra_infos: Sequence[object],
    **settings: Any,
) -> list[float]:
    """Score each response by :func:`.math_reward.compute_score`, which takes ``settings``.

    ``data_sources`` and ``extra_infos`` are not used.

    Raises:
        RewardError: a ground truth cannot be read.
        ValueError: the numbers of responses and truths differ.
    """
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [math_reward.compute_score(text, truth, **settings) for text, truth in pairs]
