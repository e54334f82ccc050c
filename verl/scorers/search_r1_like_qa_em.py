"""Scorer of question answering with search (Search-R1, https://arxiv.org/abs/2503.09516): exact match with a target.

Text is normalised as for SQuAD (https://arxiv.org/abs/1606.05250): lower case, no punctuation, no
articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping

from verl.errors import ConfigError, RewardError
from verl.scorers.parts import last_tag
from verl.scorers.registry import register_scorer

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
MANY_ANSWERS = 10
"""A right response with more opening or more closing ``answer`` tags than this gets a quarter of the score."""


def normalize_answer(text: str) -> str:
    """Lower-case a text and remove ASCII punctuation, English articles and surplus white space.

    >>> normalize_answer("The  U.S. Army!")
    'us army'
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def em_check(prediction: str, targets: list[str]) -> bool:
    """Return whether the prediction is one of the targets, both normalised.

    A text of which normalisation leaves nothing (the grade "A", "!") is only stripped and lower-cased.
    """
    return _key(prediction) in {_key(target) for target in targets}


def subem_check(prediction: str, targets: list[str]) -> bool:
    """Return whether the prediction contains one of the targets, both normalised.

    A target of which normalisation leaves nothing must be the whole prediction, as in :func:`em_check`.
    """
    text = normalize_answer(prediction)
    return em_check(prediction, targets) or any(target in text for target in map(normalize_answer, targets) if target)


def extract_solution(solution_str: str) -> str | None:
    """Return what the last ``<answer>...</answer>`` of a response holds, without surrounding space; None without one.

    >>> extract_solution("<answer> Rome </answer> no, <answer>Paris</answer>")
    'Paris'
    """
    return last_tag(solution_str, "answer")


def _targets(truth: object) -> list[str]:
    values = truth.get("target") if isinstance(truth, Mapping) else truth
    targets = [values] if isinstance(values, str) else list(values) if isinstance(values, Iterable) else []
    if not targets or not all(isinstance(target, str) and target.strip() for target in targets):
        raise RewardError(
            f"search_r1: ground_truth is {truth!r:.120}; expected {{'target': ['Paris', 'City of Paris']}}."
        )
    return targets


@register_scorer("searchR1_*", truth=_targets)
def compute_score(
    solution_str: str, ground_truth: object, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return ``score`` if the last ``<answer>`` is one of the targets, ``format_score`` if not, 0 without one.

    Args:
        solution_str: the response.
        ground_truth: ``{"target": ["Paris", "City of Paris"]}``; the target may also be one string, and the
            target or list may be given without the dict.
        method: ``strict``; public code passes it, and there is no other.
        format_score: result for another answer.
        score: result for a target; a quarter of it if the response has more than ten opening or closing
            tags, which discourages guessing.

    Raises:
        RewardError: there is no target.
        ConfigError: there is no such method.
    """
    return _score(solution_str, ground_truth, method, format_score, score, em_check)


def compute_score_subem(
    solution_str: str, ground_truth: object, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Score like :func:`compute_score`, but the answer need only contain a target (sub-EM)."""
    return _score(solution_str, ground_truth, method, format_score, score, subem_check)


def _score(
    text: str, truth: object, method: str, format_score: float, score: float, is_right: Callable[[str, list[str]], bool]
) -> float:
    if method != "strict":
        raise ConfigError(f"search_r1: method='{method}' is unknown; there is only strict.")
    targets = _targets(truth)
    answer = extract_solution(text)
    if answer is None:
        return 0.0
    if not is_right(answer, targets):
        return format_score
    guesses = max(text.count("<answer>"), text.count("</answer>"))
    return score / 4 if guesses > MANY_ANSWERS else score


def _key(text: str) -> str:
    return normalize_answer(text) or text.strip().lower()
