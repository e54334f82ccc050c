"""Compare the answer of a program with the expected one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

TOLERANCE = 1e-6
"""Allowed absolute or relative error of non-integers, as is usual in programming contests."""
NUMBER = re.compile(r"[+-]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][+-]?\d{1,4})?", re.ASCII)


def same_text(answer: str, expected: str) -> bool:
    r"""Whether two outputs are equal line by line and word by word.

    Empty lines and the amount of white space in a line are ignored; case is not. Two words are also equal if both are
    numbers, the expected one with a fraction or an exponent, within :data:`TOLERANCE`; or if the answer is written with
    one and its value is exactly the expected integer.

    >>> same_text("1  2\n0.33333333\n", "1 2\n\n0.333333333333")
    True
    >>> same_text("1 2", "1\n2")
    False
    """
    left, right = _words(answer), _words(expected)
    return len(left) == len(right) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(left, right, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _same_word(answer: str, expected: str) -> bool:
    if answer == expected:
        return True
    if not (NUMBER.fullmatch(answer) and NUMBER.fullmatch(expected)):
        return False
    if not set(expected).isdisjoint(".eE"):
        return _close(float(answer), float(expected))
    # A tolerance would accept a guess of the first digits. 3.0 is 3, but 03 is not.
    return not set(answer).isdisjoint(".eE") and Decimal(answer) == Decimal(expected)


def same_value(answer: object, expected: object) -> bool:
    """Whether two JSON values are equal, to any depth.

    Numbers are compared exactly if the expected one is an integer, else within :data:`TOLERANCE`; ``true`` is not a
    number.

    >>> same_value([1, {"a": 0.1}], [1, {"a": 0.1000000001}])
    True
    >>> same_value(True, 1)
    False
    """
    if isinstance(answer, bool) or isinstance(expected, bool):
        return answer is expected
    if isinstance(answer, (int, float)) and isinstance(expected, (int, float)):
        return answer == expected or (isinstance(expected, float) and _close(answer, expected))
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(same_value, answer, expected))
    if isinstance(answer, dict) and isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(same_value(answer[key], expected[key]) for key in expected)
    return type(answer) is type(expected) and answer == expected


def _close(left: float, right: float) -> bool:
    try:
        is_finite = math.isfinite(left) and math.isfinite(right)
        return is_finite and math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False


def plain(value: Any) -> Any:
    """Convert a value to JSON types: tuples and arrays to lists, keys to strings, sets to sorted lists.

    The harness converts results in the same way, so that both can be compared.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else json.dumps(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
