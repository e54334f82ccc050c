r"""Decide whether two mathematical answers have the same value, with the library math-verify.

It reads LaTeX well, but not ``50\%``, ``1e3``, ``5.``, ``½``, ``1\,000`` or ``5 dollars``, so both answers are
normalized first (:func:`canonical`, :func:`readings`).

Whatever takes too much work is decided as text (:mod:`verl.scorers.math_limits`): it is a wrong answer, not
a failed sample, for those are left out of training, and a policy could exploit that.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

from verl.errors import RewardError
from verl.scorers.answer_text import CURRENCY, plain_answer, read_number
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
_DECIMAL = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_UNIT_NAMES = {
    "centimeter": "cm", "centimetre": "cm", "cent": "\u00a2", "day": "day", "degree": "\u00b0", "dollar": "$",
    "feet": "ft", "foot": "ft", "gram": "g", "hour": "h", "hr": "h", "inche": "inch", "inch": "inch", "kilogram": "kg",
    "kilometer": "km", "kilometre": "km", "liter": "l", "litre": "l", "meter": "m", "metre": "m", "mile": "mi",
    "milliliter": "ml", "millimeter": "mm", "minute": "min", "mph": "mph", "ounce": "oz", "percent": "%",
    "pound": "lb", "sec": "s", "second": "s", "unit": "unit", "week": "week", "yard": "yd", "year": "year",
}  # fmt: skip
"""Symbols of units by their names in the singular."""
_NAMED_UNIT = "|".join(
    sorted({name for each in _UNIT_NAMES.items() for name in each if len(name) > 1 and name != "mi"})
)
_UNIT = (
    rf"(?:[A-Za-z]{{4,}}|(?:(?i:{_NAMED_UNIT}|in|mi|am|pm|cc|hz|kw|kj|kph|mg|rpm)s?"
    r"|(?!abc)(?=\w{0,2}[aeiou])[A-Za-z]{3})"
    r"(?![A-Za-z])|[ap]\.m|[mgshlLNJWVAK](?=\s*[\^/]))(?:\s*\^\s*(?:[23]|\{[23]\}))?"
)
"""A word or a symbol; ``xy`` and ``abc`` are products."""
_CLOCK = r"\d{1,2}:\d{2}"
_WITH_WORDS = re.compile(
    rf"({_DECIMAL.pattern}|{_CLOCK})\s+({_UNIT}(?:\s*/\s*(?:{_UNIT}|[mgshlL])|(?:\s+[A-Za-z]{{2,}})*))"
)
"""A number with words or a unit after it, as ``5 square feet``, ``5 cm^2`` and ``5 m/s``."""
_LETTER_UNIT = re.compile(rf"({_DECIMAL.pattern})\s+([mgshlL](?:\s*\^\s*(?:[23]|\{{[23]\}}))?)")
_TEXT_UNIT = re.compile(
    r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*"
    r"\{(?=[^{}]*(?:[A-Za-z]{2}|(?<![A-Za-z])[mgshlLNJWVAKCF](?![A-Za-z])))((?:[^{}\\]|\\[,;:! ])*)\}"
    r"\s*(\^\s*(?:\d|\{\d\})\s*)?\Z"
)
"""A unit in a text; of single letters ``i``, ``e`` and ``x`` are none."""
_UPRIGHT = re.compile(r"\\(?:mathrm|text|textrm)\s*\{([ie])\}")
"""The imaginary unit and the base of logarithms, as some write them."""
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:\\(?:text|mathrm)\s*\{\s*([CF])\s*\}|([CF]))?\s*\Z")
_PRICE = re.compile(rf"(-?)({CURRENCY})\s*(\d[\d,]*(?:\.\d+)?)")
_CURRENCIES = {"euro": "\u20ac", "pounds": "\u00a3", "yen": "\u00a5", "textdollar": "$", "dollar": "$"}
_CAPITAL = re.compile(r"(?<![A-Za-z])(?:K(?![A-Za-z])|M(?=[A-Za-z]?(?![A-Za-z])))")
"""Kelvin and mega, other than k and milli."""
_UNIT_WORD = re.compile(r"[A-Za-z]+|[^A-Za-z\s{}~\\,;:!.]")
_AFTER_VALUE = re.compile(
    rf"(.*?\S)(?:(?<=[\d}})])|\s)\s*((?:(?:square|cubic|sq)\.?\s+)?(?:{_NAMED_UNIT}|(?<=\s)[a-z]{{4,}})s?"
    rf"(?:\s*\^\s*(?:[23]|\{{[23]\}}))?(?:\s*(?:/|per\s)\s*(?:{_NAMED_UNIT}|[hsl]))?)"
)
"""Any value with a unit after it, as ``\\sqrt2 cm``, ``5km`` and ``2\\pi students``."""
_LONG_WORD = re.compile(r"[A-Z]{2,}|[A-Za-z]{5,}")
"""A text, not a product of letters: words of capitals and long ones."""
_EQUATION = re.compile(r"\s*(?:[A-Za-z]|\\[A-Za-z]+)\s*'?(?:_(?:\w|\{\w+\}))?\s*=([^=]*)")
"""An equation that answers a number: its left side is a letter."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
MAX_MATCHED_MEMBERS = 10
"""Most members of a list with repetitions that are matched by value."""
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
_NO_UNITS = {
    "hundred", "thousand", "million", "billion", "trillion", "quadrillion", "mil", "mn", "bn", "k", "lakh", "crore",
    "gros", "dozen", "half", "halve", "pair", "couple", "score", "tenth", "hundredth", "thousandth", "millionth",
    "third", "fourth", "fifth", "sixth", "eighth", "squared", "cubed", "factorial", "doubled", "tripled", "negative",
    "pi", "e", "or", "and", "in", "mod", "to", "not", "than", "plus", "minus", "time", "over", "divided", "sin", "cos",
    "tan", "log", "ln", "exp", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "twenty", "thirty", "forty", "fifty", "sixty",
}  # fmt: skip
"""Words after a number, without a final s, that change its value or continue the expression, and so are not a unit."""
_PRIMED = re.compile(r"\d'\d")
_DOTS = re.compile(r"\\[lc]?dots(?![A-Za-z])|\.{3}|\u2026")


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
    r"""Return whether two answers have the same value, as ``\frac{1}{2}``, ``0.5`` and ``1/2`` have.

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
    if left is not None or right is not None:
        expression = truth if right is None else answer
        if len(_members(expression)) > 1 or ("=" in expression and _EQUATION.fullmatch(expression) is None):
            return False
    members = _members(answer), _members(truth)
    if min(map(len, members)) > 1:
        if len(members[0]) != len(members[1]):
            return False
        if any(len(set(each)) < len(each) for each in members):  # the library would take them for sets
            return _are_same_members(*members)
    if any(bool(pattern.search(answer)) != bool(pattern.search(truth)) for pattern in (_APART, _DOTS, _PRIMED)):
        return False
    if max(map(len, members)) > 1 and any(
        map(_BRACKETS.match, (answer, truth))
    ):  # the members of a point have an order
        answer, truth = (
            f"({side})" if len(each) > 1 else side for side, each in zip((answer, truth), members, strict=True)
        )
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


def _members(text: str) -> list[str]:
    """Split a list at its commas; those of tuples, of sets in braces and of thousands are none of its own."""
    members, depth = [""], 0
    for character in _THOUSANDS.sub("", text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            members.append("")
        else:
            members[-1] += character
    return [member.strip() for member in members]


def _are_same_members(answers: list[str], truths: list[str]) -> bool:
    """Return whether two lists of equal length have the same members, each as often."""
    if len(truths) > MAX_MATCHED_MEMBERS:
        return sorted(answers) == sorted(truths)
    rest = list(truths)
    for answer in answers:
        match = next((truth for truth in rest if answer == truth or _is_equal(answer, truth)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


@functools.cache
def _library() -> tuple[Callable[[str], list[object]], Callable[[list[Any], list[Any]], bool]]:
    """Load math-verify, which takes a second, and return its reader and a comparison by exact values."""
    import math_verify

    from verl.scorers.math_values import load_comparison

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    # Of LaTeX only: by default it takes the last number of a text that it cannot read, as 5 of "@!# 5". Its time limits
    # are signals.
    # Units are split off before (`_split_unit`): of the library's some are letters, so that 5t would be 5.
    latex = [
        math_verify.LatexExtractionConfig(
            normalization_config=dataclasses.replace(
                math_verify.LatexExtractionConfig().normalization_config, units=False
            )
        )
    ]
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
    text = _UPRIGHT.sub(r"\1", text)
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
    - A unit may be left out: ``5 dollars`` is 5. Two different units, and ``5 million`` and 5, are never equal.
    - Words of three letters or more are compared without case, those of capitals or of five letters as texts.
    - Two numbers with different bases, such as ``10_2`` and ``10_3``, are never equal.

    >>> readings("50\\%", "0.5"), readings("5\\text{ km}", "5 m")
    ([('50', '0.5'), ('\\frac{50}{100}', '0.5')], [])
    """
    bases = [_BASE.fullmatch(side) for side in (answer, truth)]
    if all(bases) and len({int(base[1] or base[2]) for base in bases if base}) > 1:
        return []
    if answer.lower() != truth.lower() and any(map(_LONG_WORD.fullmatch, (answer, truth))):
        return []
    if _WORDS.fullmatch(answer) and _WORDS.fullmatch(truth):
        return [(answer.lower(), truth.lower())]
    (value, unit), (true_value, true_unit) = _split_unit(answer), _split_unit(truth)
    if unit and true_unit and unit != true_unit:
        return []
    if unit != true_unit and _changes_value(unit or true_unit):
        return []
    if "%" not in (unit, true_unit) or unit == true_unit:
        return [(value, true_value)]
    plain = (value, true_value)
    hundredths = (rf"\frac{{{value}}}{{100}}", truth) if unit else (answer, rf"\frac{{{true_value}}}{{100}}")
    return [plain, hundredths]


def have_different_units(answer: str, truth: str) -> bool:
    """Return whether both canonical answers have a unit, and not the same."""
    units = {_split_unit(text)[1] for text in (answer, truth) if len(text) <= MAX_ANSWER_LENGTH}
    return len(units - {""}) > 1


def _split_unit(text: str) -> tuple[str, str]:
    """Split an answer into its value and its unit, in one spelling; the unit is empty if there is none."""
    if degrees := _DEGREES.search(text):
        return text[: degrees.start()], "\u00b0" + (degrees[1] or degrees[2] or "")
    if unit := _TEXT_UNIT.search(text):
        value = text[: unit.start()].rstrip(" ~\\,;:!")
        return (value, _spelled(unit[1] + (unit[2] or ""))) if value else (text, "")
    if words := _WITH_WORDS.fullmatch(text) or _LETTER_UNIT.fullmatch(text):
        return words[1], _spelled(words[2])
    if price := _PRICE.fullmatch(text):
        return price[1] + price[3], _CURRENCIES.get(price[2].lstrip("\\").removesuffix("{}"), price[2][-1])
    if named := _AFTER_VALUE.fullmatch(text):
        return named[1], _spelled(named[2])
    return (_without_percent(text), "%") if text.endswith("%") else (text, "")


def _spelled(unit: str) -> str:
    """Spell a unit by symbols: ``square feet`` is ``ft^2``."""
    unit = (
        _CAPITAL.sub(lambda letter: {"K": "kelvin", "M": "mega"}[letter[0]], unit)
        .lower()
        .replace("a.m", "am")
        .replace("p.m", "pm")
    )
    words: list[str] = [word.removesuffix("s") if len(word) > 2 else word for word in _UNIT_WORD.findall(unit)]
    symbols = [_UNIT_NAMES.get(word, word) for word in words]
    if symbols[:1] in (["square"], ["cubic"]):
        symbols = [*symbols[1:], "^", "2" if symbols[0] == "square" else "3"]
    return " ".join(symbols)


def _changes_value(unit: str) -> bool:
    """Return whether words after a number are more than a unit: a multiplier, or a part of an expression."""
    words = ["", *unit.split()]
    return any(word in _NO_UNITS or (word.isdigit() and before != "^") for before, word in itertools.pairwise(words))


def _without_percent(text: str) -> str:
    return text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text
