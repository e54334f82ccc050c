"""The reward of a conversation: 1 if its last answer is right, else 0."""

from __future__ import annotations

import re
from typing import Any

ANSWER = re.compile(r"<answer>([a-z]+)</answer>")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 if the conversation ends with ``<answer>…</answer>`` and the right word in it."""
    found = ANSWER.findall(solution_str)
    return float(len(found) == 1 and solution_str.endswith("</answer>") and found[0] == ground_truth)
