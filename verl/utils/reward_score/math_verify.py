r"""The final answer of a response against the truth, for callers that give the two alone.

Decided as for every symbolic answer: :func:`verl.utils.reward_score.math_reward.is_equivalent`.
"""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score import prime_math


def compute_score(model_output: str, ground_truth: Any) -> float:
    """1 if the final answer has the value of the truth, else 0; see :func:`.prime_math.compute_score`.

    Args:
        model_output: the response.
        ground_truth: the answer.

    Raises:
        RewardError: the ground truth cannot be read.
    """
    return prime_math.compute_score(model_output, ground_truth)
