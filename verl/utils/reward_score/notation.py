r"""One spelling for mathematical answers, before they are compared by value.

What :func:`.math_reward.is_equivalent` hands to the library math-verify passes through here first:
the library reads LaTeX well, but not ``50\%``, ``1e3``, ``5.``, ``½``, ``1\,000`` or ``5 dollars``.
"""

from __future__ import annotations

import re
import unicodedata

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
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_SCIENTIFIC = re.compile(r"(-?\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,3})")
_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_WITH_WORDS = re.compile(rf"({_NUMBER.pattern})\s+([A-Za-z]{{2,}}(?:\s+[A-Za-z]{{2,}})*)")
_WORDS = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]+)*")
_BASE = re.compile(r"[0-9A-Za-z]+_(?:\{(\d{1,9})\}|(\d{1,9}))")
_NO_UNITS = {"thousand", "million", "billion", "trillion", "hundred", "dozen", "half", "pi", "or", "and", "in", "mod"}
"""Words behind a number that say how large it is, or go on: they are no unit."""


def canonical(text: str) -> str:
    r"""The same answer in plain characters: no ``$``, full stop at the end, typographic signs or spaces in numbers.

    >>> canonical("$1\\,000.$"), canonical("2½"), canonical("1e3"), canonical("−3")
    ('1000', '2\\frac{1}{2}', '1\\times 10^{3}', '-3')
    """
    text = "".join(map(_plain, text)).strip()
    for old, new in _SPELLINGS.items():
        text = text.replace(old, new)
    for opening, closing in _DELIMITERS:
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = text.removesuffix(".").rstrip()
    if wrapped := _TEXT.fullmatch(text):
        text = wrapped[1].strip()
    text = _THIN_SPACE_IN_NUMBER.sub("", text)
    scientific = _SCIENTIFIC.fullmatch(text)
    return rf"{scientific[1]}\times 10^{{{int(scientific[2])}}}" if scientific else text


def readings(answer: str, truth: str) -> list[tuple[str, str]]:
    r"""The pairs of which one must be equal in value, for two answers in canonical spelling.

    - ``50\%`` may be meant as 50, the sign being a unit, and as 0.5.
    - Words behind a number are a unit if the other answer is a bare number: ``5 dollars`` is 5.
    - Words, of three letters or more, may be written large or small.
    - Two numbers with different bases, ``10_2`` and ``10_3``, have no reading in which they are equal.

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
    """A digit or letter of another width or weight as ASCII, ``½`` as a fraction; other characters as they are."""
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
