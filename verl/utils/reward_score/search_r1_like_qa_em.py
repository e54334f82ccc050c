"""Question answering with search (Search-R1, https://arxiv.org/abs/2503.09516): exact match with one of the targets.

Text is normalised as for SQuAD (https://arxiv.org/abs/1606.05250): lower case, no punctuation, no
articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from verl.errors import RewardError
from verl.utils.reward_score import register_scorer
from verl.utils.reward_score.format import last_tag

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
MANY_ANSWERS = 10
"""A response with more opening or more closing ``answer`` tags than this gets a quarter of its score."""


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles, and surplus white space.

    >>> normalize_answer("The  U.S. Army!")
    'us army'
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def em_check(prediction: str, targets: list[str]) -> bool:
    """Whether the prediction is one of the targets, both normalised.

    Where nothing is left of a text (the mark "A", "!"), it is compared as it stands, in lower case.
    """
    return _key(prediction) in {_key(target) for target in targets}


def subem_check(prediction: str, targets: list[str]) -> bool:
    """Whether one of the targets stands somewhere in the prediction, both normalised; an empty target never does."""
    text = normalize_answer(prediction)
    return any(target in text for target in map(normalize_answer, targets) if target)


@register_scorer("searchR1_*")
def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """``score`` if the last ``<answer>...</answer>`` is one of the targets, ``format_score`` if not, 0 without one.

    Args:
        solution_str: the response.
        ground_truth: ``{"target": ["Paris", "City of Paris"]}``; the target may also be one string, and the
            list may stand by itself.
        format_score: for another answer.
        score: for a target. More than ten opening or closing tags make it a quarter, against guessing aloud.

    Raises:
        RewardError: there is no target.
    """
    return _score(solution_str, ground_truth, format_score, score, em_check)


def compute_score_subem(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """As :func:`compute_score`, but a target anywhere in the answer is enough (sub-EM)."""
    return _score(solution_str, ground_truth, format_score, score, subem_check)


def _score(
    text: str, truth: Any, format_score: float, score: float, is_right: Callable[[str, list[str]], bool]
) -> float:
    targets = _targets(truth)
    answer = last_tag(text, "answer")
    if answer is None:
        return 0.0
    if not is_right(answer, targets):
        return format_score
    guesses = max(text.count("<answer>"), text.count("</answer>"))
    return score / 4 if guesses > MANY_ANSWERS else score


def _key(text: str) -> str:
    return normalize_answer(text) or text.strip().lower()


def _targets(truth: Any) -> list[str]:
    found = truth.get("target") if isinstance(truth, Mapping) else truth
    targets = [found] if isinstance(found, str) else list(found) if isinstance(found, Iterable) else []
    if not targets or not all(isinstance(target, str) for target in targets):
        raise RewardError(
            f"search_r1: ground_truth is {truth!r:.120}; expected {{'target': ['Paris', 'City of Paris']}}."
        )
    return targets
