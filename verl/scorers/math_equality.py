r"""Decide whether two mathematical answers have the same value, with the library math-verify.

It reads LaTeX well, but not ``50\%``, ``1e3``, ``5.``, ``½``, ``1\,000`` or ``5 dollars``, so both answers are
normalized first (:func:`canonical`, :func:`readings`).

Whatever takes too much work is decided as text (:mod:`verl.scorers.math_limits`): it is a wrong answer, not
a failed sample, for those are left out of training, and a policy could exploit that.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from verl.errors import RewardError
from verl.scorers.answer_text import plain_answer, read_number
from verl.scorers.math_limits import is_text_bounded, limited
from verl.scorers.registry import text_of_truth

MAX_ANSWER_LENGTH = 2000
"""Longest answer that is compared by value, in characters; a longer one is compared as text."""

_WARM_UP = (
    ("x+1", "2x"), (r"\sin x+1.5", r"\cos x"), ("x^5+x=1", "x^5=2"), ("(1,2)", "[x,3)"), (r"\log x>2", r"\sqrt{x}<2"),
)  # fmt: skip

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{(.*)\}|([^\s{].*))", re.DOTALL)
_SPACE_IN_NUMBER = re.compile(r"(?<=\d)(?:\\[,;: ]| )(?=\d{3}(?!\d|\s*/))")
_FORMULA_WITH_WORDS = re.compile(r"\$([^$]+)\$ ([A-Za-z ]+)")
_LEADING = re.compile(r"\A(?:\\approx(?![A-Za-z])|=)\s*")
_SPACE = re.compile(r"(?<!\d) | (?!\d)")
"""A space that means nothing; ``1 2`` is not 12."""
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_APART = re.compile(r"(?<![A-Za-z_^.\d])\d[\d.]*\s+(?!\d{3}(?!\d)|\d+\s*/)\d")
"""Two numbers side by side, which the library reads as one; no thousands and no mixed number."""
_MIXED = re.compile(r"(-?\d+)(?:\s|\\[,;: ])+(\d+)/(\d+)")
_SCIENTIFIC = re.compile(r"(-?\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,3})")
_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_UNIT = r"(?:[A-Za-z]{2,}|[mgshlLNJWVAK](?=\s*[\^/]))(?:\s*\^\s*(?:[23]|\{[23]\}))?"
_WITH_WORDS = re.compile(rf"({_NUMBER.pattern})\s+({_UNIT}(?:\s*/\s*(?:{_UNIT}|[mgshlL])|(?:\s+[A-Za-z]{{2,}})*))")
"""A number with words or a unit after it, as ``5 square feet``, ``5 cm^2`` and ``5 m/s``."""
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_PLUS_MINUS_IN_BRACES = re.compile(r"\{[^{}]*\\pm(?![A-Za-z])")
"""Such a sign is none to the library, as in ``\\frac{1\\pm\\sqrt5}{2}``."""
_SET_BUILDER = re.compile(
    r"(?:(?:\\left)?\\\{)?\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*(?:\{R\}|R)\s*)?(?:\\mid(?![A-Za-z])|\||:)"
    r"([^|]*(?:[<>]|\\[lg]eq?(?![A-Za-z]))[^|]*?)(?:(?:\\right)?\\\})?"
)
r"""``\{x | x > 2\}``; an inequality stands for its solutions."""
_WORDS = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]+)*")
_BASE = re.compile(r"[0-9A-Za-z]+_(?:\{(\d{1,9})\}|(\d{1,9}))")
_BRACES = re.compile(r"(?:\\left\s*)?\\\{")
_BRACKETS = re.compile(r"(?:\\left\s*)?[(\[]")
_NO_UNITS = {"thousand", "million", "billion", "trillion", "hundred", "dozen", "half", "pi", "or", "and", "in", "mod"}
"""Words after a number that change its value or continue the expression, and so are not a unit."""


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` (or ``\fbox{...}``, ``\boxed 3``), command included; None if none or unclosed.

    >>> last_boxed_only_string(r"so $\boxed{\frac{1}{2}}$.")
    '\\boxed{\\frac{1}{2}}'
    """
    start = max(string.rfind("\\boxed"), string.rfind("\\fbox"))
    if start < 0:
        return None
    end = start + len("\\boxed" if string.startswith("\\boxed", start) else "\\fbox")
    opening = len(string) - len(string[end:].lstrip())
    if not string.startswith("{", opening):
        words = string[opening:].split("$")[0].split()
        return string[start : opening + len(words[0])] if words else None
    depth = 0
    for index in range(opening, len(string)):
        escaped = string[index - 1] == "\\"
        if string[index] == "{" and not escaped:
            depth += 1
        elif string[index] == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return string[start : index + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""Return what stands in ``\boxed{...}``, ``\fbox{...}`` or after ``\boxed ``.

    Raises:
        ValueError: the text is no such box.

    >>> remove_boxed(r"\boxed{3}"), remove_boxed(r"\boxed 3")
    ('3', '3')
    """
    if match := _BOX.fullmatch(s or ""):
        return match[1] if match[1] is not None else match[2]
    raise ValueError(rf"{s!r} is no \boxed{{...}}; last_boxed_only_string(text) finds the last one of a text.")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` (or ``\fbox{...}``, ``\boxed 3``); None if none or unclosed."""
    box = last_boxed_only_string(text)
    return None if box is None else remove_boxed(box).strip()


def text_of_answer(ground_truth: object) -> str:
    r"""Return the answer of a ground truth: what stands in its last ``\boxed{...}`` or after its last ``####``, or all.

    Raises:
        RewardError: it is neither a text nor a finite number, or blank, or a brace of it has no counterpart.
    """
    text = text_of_truth(ground_truth)
    boxed = last_boxed(text)
    answer = boxed if boxed is not None else text.rpartition("####")[2].strip()
    braces = re.findall(r"\\.|[{}]", answer, re.DOTALL)
    if braces.count("{") != braces.count("}"):
        raise _unreadable(text)
    return answer


def read_truth(ground_truth: object) -> str:
    r"""Return the canonical answer of a ground truth: ``\frac{1}{2}``, ``0.5``, ``\boxed{x+1}``, ``#### 5``, ``73.0``.

    Raises:
        RewardError: it is no text or number, or nothing is left of it to compare with.
    """
    text = canonical(text_of_answer(ground_truth))
    if not text.strip(" $"):
        raise _unreadable(str(ground_truth))
    return text


def _unreadable(truth: str) -> RewardError:
    return RewardError(
        f"math: the ground truth {truth!r:.120} cannot be read as mathematics; expected an answer such as 5, "
        "'\\frac{1}{2}' or 'x+1', alone, in \\boxed{...} or after '####'. Correct reward_model.ground_truth of this "
        "row, or its data source."
    )


def is_equivalent(answer: str, truth: object) -> bool:
    r"""Whether two answers have the same value, as ``\frac{1}{2}``, ``0.5`` and ``1/2`` have.

    Raises:
        RewardError: the truth cannot be read.
    """
    right = read_truth(truth)
    if len(answer) > MAX_ANSWER_LENGTH:
        return _without_spaces(answer) == _without_spaces(str(truth))
    left = canonical(answer)
    if _without_spaces(left) == _without_spaces(right):
        return True
    return any(_is_equal(*pair) for pair in readings(left, right))


def _without_spaces(text: str) -> str:
    return _SPACE.sub("", " ".join(text.strip().strip("$").split()))


def _is_equal(answer: str, truth: str) -> bool:
    left, right = read_number(answer), read_number(truth)
    if left is not None and right is not None:
        return left.equals(right)
    if bool(_APART.search(answer)) != bool(_APART.search(truth)):
        return False
    if not is_text_bounded(answer) or not is_text_bounded(truth):
        return False  # the same texts have been found equal before
    if (_BRACES.match(answer) and _BRACKETS.match(truth)) or (_BRACKETS.match(answer) and _BRACES.match(truth)):
        return False  # a set is no point and no interval, although the library compares their members
    parse, verify = _library()
    gold = parse(f"\\boxed{{{truth}}}")
    if not gold:
        raise _unreadable(truth)
    parsed = parse(f"\\boxed{{{answer}}}")
    return limited(lambda: verify(gold, parsed), otherwise=False)


@functools.cache
def _library() -> tuple[Callable[[str], list[object]], Callable[[list[Any], list[Any]], bool]]:
    """Load math-verify, which takes a second, and return its reader and a comparison by exact values."""
    import math_verify

    from verl.scorers.math_values import load_comparison

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    # Of LaTeX only: by default it takes the last number of a text that it cannot read, as 5 of "@!# 5". Its time limits
    # are signals.
    latex = [math_verify.LatexExtractionConfig()]
    parse = functools.partial(math_verify.parse, extraction_config=latex, parsing_timeout=None)  # type: ignore[arg-type]
    verify = load_comparison()
    # A comparison that loads modules and fills caches has many more steps, and its result must not depend on that.
    for left, right in _WARM_UP:
        verify(parse(f"\\boxed{{{left}}}"), parse(f"\\boxed{{{right}}}"))
    return parse, verify


def canonical(text: str) -> str:
    r"""Normalize an answer: without wrappers, typographic signs and spaces in numbers.

    >>> canonical("$1\\,000.$"), canonical("2½"), canonical("2 1/2"), canonical("1e3"), canonical("−3")
    ('1000', '2\\frac{1}{2}', '2\\frac{1}{2}', '1\\times 10^{3}', '-3')
    """
    text = _LEADING.sub("", plain_answer(text))
    text = _PI.sub(r"\\pi ", text)
    text = _SPACE_IN_NUMBER.sub("", text)
    if formula := _FORMULA_WITH_WORDS.fullmatch(text):
        text = f"{formula[1]} {formula[2]}"
    if mixed := _MIXED.fullmatch(text):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if _PLUS_MINUS_IN_BRACES.search(text) and len(_PLUS_MINUS.findall(text)) == 1 and "\\mp" not in text:
        return ",".join(_PLUS_MINUS.sub(sign, text) for sign in "+-")
    if condition := _SET_BUILDER.fullmatch(text):
        return condition[2].strip()
    scientific = _SCIENTIFIC.fullmatch(text)
    return rf"{scientific[1]}\times 10^{{{int(scientific[2])}}}" if scientific else text


def readings(answer: str, truth: str) -> list[tuple[str, str]]:
    r"""Return the possible readings of two canonical answers as pairs; the answers are equal if one pair is.

    - ``50\%`` may mean 50 (the sign is a unit) or 0.5.
    - Words after a number are a unit if the other answer is only a number: ``5 dollars`` is 5.
    - Words of three letters or more are compared without case.
    - Two numbers with different bases, such as ``10_2`` and ``10_3``, are never equal.

    >>> readings("50\\%", "0.5")
    [('50', '0.5'), ('\\frac{50}{100}', '0.5')]
    """
    bases = [_BASE.fullmatch(side) for side in (answer, truth)]
    if all(bases) and len({int(base[1] or base[2]) for base in bases if base}) > 1:
        return []
    if _WORDS.fullmatch(answer) and _WORDS.fullmatch(truth):
        return [(answer.lower(), truth.lower())]
    if _NUMBER.fullmatch(truth):
        answer = _without_unit(answer)
    elif _NUMBER.fullmatch(answer):
        truth = _without_unit(truth)
    plain = (_without_percent(answer), _without_percent(truth))
    if (plain[0] == answer) == (plain[1] == truth):  # both with the sign, or both without
        return [plain]
    hundredths = (
        (rf"\frac{{{plain[0]}}}{{100}}", truth) if plain[1] == truth else (answer, rf"\frac{{{plain[1]}}}{{100}}")
    )
    return [plain, hundredths]


def _without_percent(text: str) -> str:
    return text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text


def _without_unit(text: str) -> str:
    match = _WITH_WORDS.fullmatch(text)
    return match[1] if match and not _NO_UNITS & set(match[2].lower().split()) else text
