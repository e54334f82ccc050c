r"""Geometry3K (https://arxiv.org/abs/2105.04165): 0.9 for the boxed answer and 0.1 for thinking before it."""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score import register_scorer
from verl.utils.reward_score.combine import weighted_sum
from verl.utils.reward_score.math_reward import is_equivalent, last_boxed


def accuracy_reward(solution_str: str, ground_truth: Any, use_boxed: bool = True) -> float:
    r"""1 if the last ``\boxed{...}`` (the whole response without ``use_boxed``) has the value of the truth, else 0."""
    answer = last_boxed(solution_str) if use_boxed else solution_str.strip()
    return float(answer is not None and is_equivalent(answer, str(ground_truth)))


def format_reward(solution_str: str) -> float:
    r"""1 if the response begins with ``<think>``, closes it, and gives a ``\boxed{...}`` after that; else 0."""
    text = solution_str.lstrip()
    place = 0
    for part in ("<think>", "</think>", "\\boxed{", "}"):
        found = text.find(part, place)
        if found < 0 or (part == "<think>" and found > 0):
            return 0.0
        place = found + len(part)
    return 1.0


@register_scorer("hiyouga/geometry3k")
def compute_score(
    solution_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1
) -> dict[str, float]:
    r"""``0.9 · accuracy + 0.1 · format``, each of them 0 or 1.

    Accuracy: the last ``\boxed{...}`` has the value of the truth. Format: ``<think>...</think>`` and
    then a ``\boxed{...}``.

    Args:
        solution_str: the response.
        ground_truth: the answer.
        use_boxed: false compares the whole response instead of the box.
        format_score: weight of the format; accuracy has the rest.

    Returns:
        ``score``, and ``accuracy`` and ``format``.

    Raises:
        RewardError: the ground truth cannot be read.
    """
    accuracy, form = accuracy_reward(solution_str, ground_truth, use_boxed), format_reward(solution_str)
    return weighted_sum({"accuracy": (1.0 - format_score, accuracy), "format": (format_score, form)})
