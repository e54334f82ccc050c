r"""Decide whether two mathematical answers have the same value, with the library math-verify.

It reads LaTeX well, but not ``50\%``, ``1e3``, ``5.``, ``½``, ``1\,000`` or ``5 dollars``, so both answers are
normalized first (:func:`canonical`, :func:`readings`).

Whatever takes too much work is decided as text (:mod:`verl.utils.reward_score.math_limits`): it is a wrong answer, not
a failed sample, for those are left out of training, and a policy could exploit that.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from verl.errors import RewardError
from verl.utils.reward_score.math_limits import is_text_bounded, limited

MAX_ANSWER_LENGTH = 2000
"""Longest answer that is compared by value, in characters; a longer one is compared as text."""

_WARM_UP = (
    ("x+1", "2x"), (r"\sin x+1.5", r"\cos x"), ("x^5+x=1", "x^5=2"), ("(1,2)", "[x,3)"), (r"\log x>2", r"\sqrt{x}<2"),
)  # fmt: skip

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{(.*)\}|([^\s{].*))", re.DOTALL)
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$", "$"))
_SPELLINGS = {
    "\u2212": "-",  # minus sign
    "\u2044": "/",  # fraction slash
    "\\displaystyle": "",
    "{,}": ",",
    "{:}": ":",
    "\\!": "",
    "\u221e": r"\infty ",
    "\u03c0": r"\pi ",
}
_THIN_SPACE_IN_NUMBER = re.compile(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))")
_MIXED = re.compile(r"(-?\d+)(?:\s|\\[,;: ])+(\d+)/(\d+)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_SCIENTIFIC = re.compile(r"(-?\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,3})")
_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_WITH_WORDS = re.compile(rf"({_NUMBER.pattern})\s+([A-Za-z]{{2,}}(?:\s+[A-Za-z]{{2,}})*)")
_WORDS = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]+)*")
_BASE = re.compile(r"[0-9A-Za-z]+_(?:\{(\d{1,9})\}|(\d{1,9}))")
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
    for place in range(opening, len(string)):
        escaped = string[place - 1] == "\\"
        if string[place] == "{" and not escaped:
            depth += 1
        elif string[place] == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return string[start : place + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""Return what stands in ``\boxed{...}``, ``\fbox{...}`` or after ``\boxed ``.

    Raises:
        ValueError: the text is no such box.

    >>> remove_boxed(r"\boxed{3}"), remove_boxed(r"\boxed 3")
    ('3', '3')
    """
    if found := _BOX.fullmatch(s or ""):
        return found[1] if found[1] is not None else found[2]
    raise ValueError(rf"{s!r} is no \boxed{{...}}; last_boxed_only_string(text) finds the last one of a text.")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` (or ``\fbox{...}``, ``\boxed 3``); None if none or unclosed."""
    box = last_boxed_only_string(text)
    return None if box is None else remove_boxed(box).strip()


def is_equivalent(answer: str, truth: str) -> bool:
    r"""Whether two answers have the same value, as ``\frac{1}{2}``, ``0.5`` and ``1/2`` have.

    Raises:
        RewardError: the truth cannot be read.
    """
    if len(answer) > MAX_ANSWER_LENGTH:
        return _without_spaces(answer) == _without_spaces(truth)
    answer, truth = canonical(answer), canonical(truth)
    if _without_spaces(answer) == _without_spaces(truth):
        return True
    return any(_is_equal(left, right) for left, right in readings(answer, truth))


def _without_spaces(text: str) -> str:
    return "".join(text.strip().strip("$").split())


def _is_equal(answer: str, truth: str) -> bool:
    if not is_text_bounded(answer) or not is_text_bounded(truth):
        return False  # the same texts have been found equal before
    parse, verify = _library()
    gold = parse(f"\\boxed{{{truth}}}")
    if not gold:
        raise RewardError(
            f"math: the ground truth {truth!r} cannot be read as mathematics. Correct reward_model.ground_truth of "
            "this row."
        )
    found = parse(f"\\boxed{{{answer}}}")
    return limited(lambda: bool(verify(gold, found)), otherwise=False)


@functools.cache
def _library() -> tuple[Callable[[str], list[Any]], Callable[[Any, Any], bool]]:
    """Load math-verify, which takes a second, and return its functions without their time limits, which are signals."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    # Of LaTeX only: by default it takes the last number of a text that it cannot read, as 5 of "@!# 5".
    latex = [math_verify.LatexExtractionConfig()]
    parse = functools.partial(math_verify.parse, extraction_config=latex, parsing_timeout=None)  # type: ignore[arg-type]
    verify = functools.partial(math_verify.verify, timeout_seconds=None)
    # A comparison that loads modules and fills caches has many more steps, and its result must not depend on that.
    for left, right in _WARM_UP:
        verify(parse(f"\\boxed{{{left}}}"), parse(f"\\boxed{{{right}}}"))
    return parse, verify


def canonical(text: str) -> str:
    r"""Normalize an answer: without ``$``, final full stop, typographic signs and spaces in numbers.

    >>> canonical("$1\\,000.$"), canonical("2½"), canonical("2 1/2"), canonical("1e3"), canonical("−3")
    ('1000', '2\\frac{1}{2}', '2\\frac{1}{2}', '1\\times 10^{3}', '-3')
    """
    text = "".join(map(_plain, text)).strip()
    for old, new in _SPELLINGS.items():
        text = text.replace(old, new)
    for opening, closing in _DELIMITERS:
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = text.removesuffix(".").rstrip().removeprefix("\\approx").lstrip()
    if wrapped := _TEXT.fullmatch(text):
        text = wrapped[1].strip()
    text = _THIN_SPACE_IN_NUMBER.sub("", text)
    if mixed := _MIXED.fullmatch(text):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
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


def _plain(character: str) -> str:
    """Convert digits and letters of other widths or weights to ASCII, and ``½`` to a fraction; keep all others."""
    if character.isascii():
        return character
    if "VULGAR FRACTION" in unicodedata.name(character, ""):
        above, _, below = unicodedata.normalize("NFKC", character).partition("\u2044")
        return rf"\frac{{{above}}}{{{below}}}" if below else character
    simple = unicodedata.normalize("NFKC", character)
    return simple if simple.isascii() and simple.isalnum() and unicodedata.category(character) != "No" else character


def _without_percent(text: str) -> str:
    return text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text


def _without_unit(text: str) -> str:
    found = _WITH_WORDS.fullmatch(text)
    return found[1] if found and not _NO_UNITS & set(found[2].lower().split()) else text
