"""The reward of a sum: 1 if the last number of the response is the right one, else 0."""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 if the last number is right, whatever is written around it: ``12``, ``5 + 7 = 12.``"""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)
