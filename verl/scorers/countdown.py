"""Scorer of Countdown: reach a target with given numbers and + - * /."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from verl.errors import RewardError
from verl.scorers.answer_text import plain_answer
from verl.scorers.parts import last_tag
from verl.scorers.registry import register_scorer

MAX_LENGTH = 256
"""Longest accepted expression, in characters; bounds the depth of the tree and the size of the numbers."""
ALLOWED = re.compile(r"[0-9+\-*/()\s]*")
_SIGN = re.compile(r"\\(?:(times|cdot)|div)(?![A-Za-z])")


def extract_solution(solution_str: str) -> str | None:
    """Return the text of the last ``<answer>...</answer>``, or None."""
    return last_tag(solution_str, "answer")


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Evaluate an expression of integers, + - * / and parentheses, exactly: 1/3*3 is 1.

    Signs and wrappers are read as in :mod:`.answer_text`: ``$3 × (1 − 2)$``. No code is executed: the text is parsed,
    and any other syntax is refused.

    Returns:
        the value and the integers; None for any other expression, a division by zero, or a text longer
        than ``MAX_LENGTH``.
    """
    if len(expression.strip()) > MAX_LENGTH:
        return None
    text = _SIGN.sub(lambda sign: "*" if sign[1] else "/", plain_answer(expression))
    if not text or not ALLOWED.fullmatch(text) or "**" in text or "//" in text:
        return None
    try:
        tree = ast.parse(f"({text})", mode="eval")
        numbers: list[int] = []
        return _value(tree.body, numbers), numbers
    except (SyntaxError, ZeroDivisionError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, numbers)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
    raise ValueError(f"{type(node).__name__} is no part of a countdown expression")


def _puzzle(truth: Mapping[str, Any]) -> tuple[int, Counter[int]]:
    """Read the target and the numbers of a ground truth; 9.0 is 9."""
    try:
        return _whole(truth["target"]), Counter(map(_whole, truth["numbers"]))
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise RewardError(
            f"countdown: ground_truth is {truth!r:.120}; expected {{'target': 9, 'numbers': [1, 2, 3]}}."
        ) from error


def _whole(value: str | float) -> int:
    if not float(value).is_integer():
        raise ValueError(f"{value} is no whole number")
    return int(value) if "." not in str(value) else int(float(value))


@register_scorer("countdown", truth=_puzzle)
def compute_score(
    solution_str: str, ground_truth: Mapping[str, object], format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return ``score`` if the last answer reaches the target and uses each number exactly as often as given.

    Any other valid expression gets ``format_score``, no expression 0. A response has ``<answer>(1 + 2) * 3</answer>``,
    a ground truth is ``{"target": 9, "numbers": [1, 2, 3]}``.

    Raises:
        RewardError: the ground truth has another form.
    """
    target, allowed = _puzzle(ground_truth)
    expression = extract_solution(solution_str)
    result = None if expression is None else evaluate(expression)
    if result is None:
        return 0.0
    value, numbers = result
    return score if value == target and Counter(numbers) == allowed else format_score
