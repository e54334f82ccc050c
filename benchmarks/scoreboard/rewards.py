"""The rewards of the tasks, which every framework calls; they need the standard library alone."""

from __future__ import annotations

import re
from typing import Any


def countdown(response: str, truth: dict[str, Any]) -> float:
    """1 if the last answer uses each number once and reaches the target by plus and minus, else 0."""
    answers = re.findall(r"<answer>(.*?)</answer>", response)
    if not answers or not re.fullmatch(r"\s*\d+(\s*[+-]\s*\d+)*\s*", answers[-1]):
        return 0.0
    terms = re.findall(r"([+-]?)\s*(\d+)", answers[-1])
    value = sum(-int(number) if sign == "-" else int(number) for sign, number in terms)
    numbers = sorted(int(number) for _, number in terms)
    return float(value == truth["target"] and numbers == sorted(truth["numbers"]))


def sums(response: str, truth: str) -> float:
    """1 if the last number is the right one, else 0."""
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and numbers[-1] == truth)


REWARDS = {"countdown": countdown, "sums": sums}


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: object = None) -> float:
    """Score a response by the reward of its task."""
    return REWARDS[data_source](solution_str, ground_truth)
