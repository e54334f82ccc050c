r"""Scorer of MATH (arXiv:2103.03874): the last ``\boxed{...}`` must equal the ground truth in value."""

from __future__ import annotations

from verl.scorers.math_equality import is_equivalent, last_boxed, read_truth
from verl.scorers.math_equality import last_boxed_only_string as last_boxed_only_string
from verl.scorers.math_equality import remove_boxed as remove_boxed
from verl.scorers.registry import register_scorer


@register_scorer(
    "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_reward", truth=read_truth
)
def compute_score(solution_str: str, ground_truth: object, format_score: float = 0.0, score: float = 1.0) -> float:
    r"""Return ``score`` if the last boxed answer equals the truth, ``format_score`` if it does not, 0 without one.

    The truth may be given with or without ``\boxed``.

    Raises:
        RewardError: the ground truth cannot be read.
    """
    answer = last_boxed(solution_str)
    if answer is None:
        return 0.0
    return score if is_equivalent(answer, ground_truth) else format_score
