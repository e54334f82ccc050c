"""The reward of a sum: 1 if the response is the right number and nothing else, else 0."""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 if the text, without spaces around it, is the number."""
    return float(solution_str.strip() == ground_truth)


def has_right_number(text: str, truth: str) -> bool:
    """Whether the last number in a text is the right one, whatever is written around it."""
    numbers = re.findall(r"\d+", text)
    return bool(numbers) and numbers[-1] == truth
