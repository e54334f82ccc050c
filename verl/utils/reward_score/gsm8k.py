"""GSM8K (arXiv:2110.14168): the number behind ``####``."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from verl.errors import ConfigError
from verl.utils.reward_score import register_scorer

NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
MARKED = re.compile(rf"####\s*({NUMBER})")
ANY = re.compile(NUMBER)

Method = Literal["strict", "flexible"]


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The number that a response gives as its answer, without ``$`` and thousands' commas.

    Args:
        solution_str: the response.
        method: ``strict`` takes the number behind the last ``####``, ``flexible`` the last number of the text.

    Returns:
        the number's digits, or None if there is none.
    """
    if method not in ("strict", "flexible"):
        raise ConfigError(f"gsm8k: method='{method}' is unknown; there are strict and flexible.")
    found = (MARKED if method == "strict" else ANY).findall(solution_str)
    return found[-1].replace(",", "").replace("$", "") if found else None


@register_scorer("openai/gsm8k", "gsm8k")
def compute_score(
    solution_str: str, ground_truth: Any, method: Method = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """``score`` for the right number, ``format_score`` for another one, 0 for none.

    Numbers are compared as numbers: 1,000 is 1000 is 1000.00.

    Args:
        solution_str: the response.
        ground_truth: the number, as text or number.
        method: see :func:`extract_solution`.
        format_score: for a wrong number in the right form.
        score: for the right number.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if _same_number(answer, str(ground_truth)) else format_score


def _same_number(answer: str, truth: str) -> bool:
    truth = truth.strip().replace(",", "").replace("$", "")
    try:
        return Decimal(answer) == Decimal(truth)
    except InvalidOperation:
        return answer == truth
