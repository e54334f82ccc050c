"""Scorer of GSM8K (arXiv:2110.14168): the number after ``####``."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from verl.errors import ConfigError
from verl.utils.reward_score.registry import register_scorer, text_of_truth

NUMBER = r"-?\$?(?:(?<!\.)\.)?\d[\d,.]*"
"""A run of digits, commas and full stops; ``5.5.5`` is one, and equals no number."""
MARKED = re.compile(rf"####\s*({NUMBER})")
ANY = re.compile(NUMBER)

Method = Literal["strict", "flexible"]


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """Return the number that a response gives as its answer, without ``$`` and thousands separators; None if none.

    Method ``strict`` takes the number after the last ``####``, ``flexible`` the last number of the text.
    """
    if method not in ("strict", "flexible"):
        raise ConfigError(f"gsm8k: method='{method}' is unknown; there are strict and flexible.")
    found = (MARKED if method == "strict" else ANY).findall(solution_str)
    return found[-1].rstrip(".,").replace(",", "").replace("$", "") if found else None


@register_scorer("openai/gsm8k", "gsm8k", truth=text_of_truth)
def compute_score(
    solution_str: str, ground_truth: Any, method: Method = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return ``score`` for the right number, ``format_score`` for another one, 0 for none.

    Numbers are compared by value: 1,000, 1000 and 1000.00 are equal. ``method``: see :func:`extract_solution`.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if _same_number(answer, text_of_truth(ground_truth)) else format_score


def _same_number(answer: str, truth: str) -> bool:
    truth = truth.strip().replace(",", "").replace("$", "")
    try:
        return Decimal(answer) == Decimal(truth)
    except InvalidOperation:
        return answer == truth
