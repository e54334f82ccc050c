r"""MATH (arXiv:2103.03874): the last ``\boxed{...}``, equal in value to the ground truth.

Equality is decided by the library math-verify. Symbolic algebra on what a model writes can run for
ever, and the library's own time limits are signals, which only a main thread can take. Powers that
cannot be worked out (``9^{9^{9^9}}``) are wrong answers; nothing else here bounds a comparison:
reward managers call scorers in processes that are killed when they take too long, and so should
you (:class:`verl.utils.killable_pool.KillablePool`).
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from verl.errors import RewardError
from verl.utils.reward_score import register_scorer
from verl.utils.reward_score.notation import canonical, readings

MAX_EXPONENT = 10_000
"""Largest number that a power in an answer may have as its exponent and still be worked out."""
_POWER = re.compile(r"\^\s*\{?\s*[-+]?\s*(\d+)(?:\s*\^\s*\{?\s*[-+]?\s*(\d+)(\s*\^)?)?")
"""An exponent, its own exponent, and whether that has one too; of numbers."""
MAX_ANSWER_LENGTH = 2000
"""Longest answer that is compared by value, in characters; a longer one is wrong unless it is the same text."""


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` (or ``\fbox{...}``, ``\boxed 3``) of a text holds.

    Returns:
        None if there is none, or its brace is never closed.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split()[0] if rest.split("$")[0].split() else None
    depth = 0
    for place, character in enumerate(rest):
        escaped = place > 0 and rest[place - 1] == "\\"
        if character == "{" and not escaped:
            depth += 1
        elif character == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return rest[1:place].strip()
    return None


@register_scorer("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_reward")
def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    r"""``score`` if the last boxed answer equals the truth, ``format_score`` if it does not, 0 without one.

    Args:
        solution_str: the response.
        ground_truth: the answer, with or without ``\boxed``.
        format_score: for a boxed answer that is wrong.
        score: for a right one.

    Raises:
        RewardError: the ground truth cannot be read.
    """
    answer = last_boxed(solution_str)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    return score if is_equivalent(answer, last_boxed(truth) or truth) else format_score


def is_equivalent(answer: str, truth: str) -> bool:
    r"""Whether two answers have the same value: ``\frac{1}{2}``, ``0.5`` and ``1/2`` do.

    Raises:
        RewardError: as :func:`compute_score`.
    """
    if len(answer) > MAX_ANSWER_LENGTH:
        return _squeezed(answer) == _squeezed(truth)
    answer, truth = canonical(answer), canonical(truth)
    if _squeezed(answer) == _squeezed(truth):
        return True
    if _is_endless(answer) and not _is_endless(truth):
        return False
    return any(_is_equal(left, right) for left, right in readings(answer, truth))


def _is_endless(answer: str) -> bool:
    """Whether a power in it is so large that working it out takes for ever, which no answer of a data set asks for.

    Such an answer is wrong, not undecided: a policy must not learn that it costs nothing.
    """
    for exponent, its_own, deeper in _POWER.findall(answer):
        digits = math.log10(max(int(exponent), 1)) * (int(its_own) if its_own else 1)
        if deeper or digits > math.log10(MAX_EXPONENT):
            return True
    return False


def _squeezed(text: str) -> str:
    return "".join(text.strip().strip("$").split())


def _is_equal(answer: str, truth: str) -> bool:
    from math_verify import verify  # here, for it loads sympy, and most scorers do without

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    gold = _parsed(truth)
    if not gold:
        raise RewardError(
            f"math: the ground truth {truth!r} cannot be read as mathematics. Correct reward_model.ground_truth of "
            "this row."
        )
    return bool(verify(gold, _parsed(answer), timeout_seconds=None))


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)  # type: ignore[arg-type]
