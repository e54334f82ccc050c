r"""Scorer of Geometry3K (https://arxiv.org/abs/2105.04165): accuracy of the boxed answer, and format."""

from __future__ import annotations

from verl.scorers.math_equality import is_equivalent, last_boxed, read_truth
from verl.scorers.registry import also_called, register_scorer


@also_called(solution_str="predict_str")
def accuracy_reward(solution_str: str, ground_truth: object, use_boxed: bool = True) -> float:
    r"""1 if the last ``\boxed{...}`` (without ``use_boxed``, the whole response) equals the truth in value, else 0."""
    answer = last_boxed(solution_str) if use_boxed else solution_str.strip()
    return float(answer is not None and is_equivalent(answer, ground_truth))


acc_reward = accuracy_reward
"""Public name of :func:`accuracy_reward`."""


@also_called(solution_str="predict_str")
def format_reward(solution_str: str) -> float:
    r"""1 if the response begins with ``<think>``, closes it, and gives a ``\boxed{...}`` after that; else 0."""
    text = solution_str.lstrip()
    position = 0
    for part in ("<think>", "</think>", "\\boxed{", "}"):
        start = text.find(part, position)
        if start < 0 or (part == "<think>" and start > 0):
            return 0.0
        position = start + len(part)
    return 1.0


@register_scorer("hiyouga/geometry3k", truth=read_truth)
@also_called(solution_str="predict_str")
def compute_score(solution_str: str, ground_truth: object, use_boxed: bool = True, format_score: float = 0.1) -> float:
    r"""Score by accuracy and format, each 0 or 1.

        score = (1 - format_score) · accuracy + format_score · format

    Accuracy: the last ``\boxed{...}``, or the whole response if not ``use_boxed``, equals the truth in value.
    Format: ``<think>...</think>`` and then a ``\boxed{...}``. ``predict_str`` is another name of the response.

    Raises:
        RewardError: the ground truth cannot be read.
    """
    accuracy = accuracy_reward(solution_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(solution_str)
