r"""Scorer of the Numina sources of PRIME (https://arxiv.org/abs/2502.01456): the final answer must equal the truth.

The answer is the last ``\boxed{...}``, or else the text after "the answer is", or else the whole response. It is
compared by value (:func:`verl.scorers.math_equality.is_equivalent`).
"""

from __future__ import annotations

import re

from verl.scorers.answer_text import plain_answer
from verl.scorers.math_equality import is_equivalent, last_boxed, read_truth
from verl.scorers.registry import also_called, register_scorer

ANSWER = re.compile(r"\banswers?(?:[ \t*_]*[:\uff1a]|[ \t]+(?:is|are)\b:?)", re.IGNORECASE)
FORMULA = re.compile(r"\$(?=\S)([^$]+)(?<=\S)\$(?!\d)")
"""``$...$`` without spaces next to the inner side of its signs and without a digit after it, as prices have."""
SENTENCE_END = re.compile(r"\.(?=\s|$)")


def final_answer(text: str) -> str | None:
    r"""Return the last ``\boxed{...}``, else the rest of the sentence after the last "answer is" or "answer:".

    If that has exactly one formula between ``$``, the formula is returned. None if there is no answer.

    >>> final_answer("The answer is: $12$. It was easy."), final_answer("Answer: 3.5")
    ('12', '3.5')
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    start = max((marker.end() for marker in ANSWER.finditer(text)), default=None)
    if start is None:
        return None
    line = text[start:].strip().split("\n", 1)[0]
    sentence = SENTENCE_END.split(line, maxsplit=1)[0]
    formulas = FORMULA.findall(sentence)
    return formulas[0] if len(formulas) == 1 else sentence.strip(" \t\r$*") or None


@register_scorer(
    "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12",
    "numina_olympiads", truth=read_truth,
)  # fmt: skip
@also_called(solution_str="model_output")
def compute_score(solution_str: str, ground_truth: object, format_score: float = 0.0, score: float = 1.0) -> float:
    r"""Return ``score`` if the final answer equals the truth in value, ``format_score`` for another one, 0 for none.

    A response that is nothing but the answer needs no mark. The truth may be given with or without ``\boxed``;
    ``model_output`` is another name of the response.

    Raises:
        RewardError: the ground truth cannot be read.
    """
    answer = final_answer(solution_str)
    if answer is not None:
        return score if is_equivalent(answer, ground_truth) else format_score
    plain = plain_answer(solution_str)
    # With formulas in it, it is a sentence, and the library would take the formulas for its answer.
    return score if is_equivalent("" if "$" in plain else plain, ground_truth) else 0.0
