r"""Numina mathematics (the sources of PRIME, https://arxiv.org/abs/2502.01456): equivalence of the final answer.

The answer is the last ``\boxed{...}``, or else what follows "the answer is". Whether it equals the
truth is decided as for every symbolic answer: :func:`verl.utils.reward_score.math_reward.is_equivalent`.
"""

from __future__ import annotations

import re
from typing import Any

from verl.utils.reward_score import register_scorer
from verl.utils.reward_score.math_reward import is_equivalent, last_boxed

ANSWER = re.compile(r"\banswers?(?:[ \t]*:|[ \t]+(?:is|are)\b:?)", re.IGNORECASE)
FORMULA = re.compile(r"\$(?=\S)([^$]+)(?<=\S)\$(?!\d)")
"""``$...$`` without space inside its dollar signs and without a digit behind it, which would be prices."""
SENTENCE_END = re.compile(r"\.(?=\s|$)")


def final_answer(text: str) -> str | None:
    r"""The last ``\boxed{...}``; without one what the sentence says behind the last "answer is" or "answer:".

    That is its formula if it has one between ``$``, and else its words.

    Returns:
        None if there is neither.

    >>> final_answer("The answer is: $12$. It was easy."), final_answer("Answer: 3.5")
    ('12', '3.5')
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    place = max((marker.end() for marker in ANSWER.finditer(text)), default=None)
    if place is None:
        return None
    line = text[place:].strip().split("\n", 1)[0]
    sentence = SENTENCE_END.split(line, maxsplit=1)[0]
    formulas = FORMULA.findall(sentence)
    return formulas[0] if len(formulas) == 1 else sentence.strip(" \t\r$*") or None


@register_scorer(
    "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12",
    "numina_olympiads",
)  # fmt: skip
def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    r"""``score`` if the final answer has the value of the truth, ``format_score`` for another one, 0 for none.

    Args:
        solution_str: the response.
        ground_truth: the answer, with or without ``\boxed``.
        format_score: for an answer that is wrong.
        score: for a right one.

    Raises:
        RewardError: the ground truth cannot be read.
    """
    answer = final_answer(solution_str)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    return score if is_equivalent(answer, last_boxed(truth) or truth) else format_score
