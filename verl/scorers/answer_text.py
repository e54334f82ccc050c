r"""Read answers as people and models write them: wrappers, signs and numbers; all scorers use this list.

    signs      :func:`with_latex_signs`     ``−3`` is ``-3``, ``√2`` is ``\sqrt{2}``, ``x²`` is ``x^{2}``
    wrappers   :func:`unwrapped`            ``**$5$.**``, ``\(5\)``, ``\boxed{5}`` and ``\text{5}`` are ``5``
    numbers    :func:`read_decimal`         ``\$1,000.50`` is 1000.5, and ``3/4``, ``1e3`` and ``5:30`` are no number
               :func:`read_number`          ``3/4``, ``\frac34``, ``2½``, ``1e3`` and ``3\times 10^2`` too, exactly

Nothing here computes: a text of thousands of characters takes milliseconds.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_WRAPPED_LENGTH = 2000
"""Longest text whose wrappers are removed, in characters; the work grows with its square."""
ROUNDED_DIGITS = 6
"""Fewest significant digits of a decimal that may be the rounding of another number."""
FLOAT_DIGITS = 15
"""Significant digits that a float keeps; those of a decimal beyond them may be noise, as in 0.30000000000000004."""
MAX_WRAPPERS = 20
"""Most wrappers that are removed from a text."""
MAX_ROOTS = 30
"""Most roots that are written in LaTeX."""
MAX_EXPONENT = 400
"""Largest power of ten that is read as a number."""

_PAIRS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"),
    ("``", "''"), ("`", "`"), ('"', '"'), ("\u201c", "\u201d"), ("{", "}"),
)  # fmt: skip
"""Wrappers that do not change an answer: delimiters of formulas, Markdown, quotation marks, a group."""
_COMMANDS = (
    "boxed", "fbox", "text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "emph", "underline",
    "mathrm", "mathbf", "mathit", "mathsf", "mathtt", "mathnormal", "boldsymbol", "bm", "mbox", "hbox", "ensuremath",
)  # fmt: skip
"""Commands of LaTeX that only change how their argument looks."""
_COMMAND = re.compile(rf"\\(?:{'|'.join(_COMMANDS)})\s*(?=\{{)")
_COLORED = re.compile(r"\\(?:textcolor|colorbox|color)\s*\{[A-Za-z0-9!]*\}\s*(?=\{)")
_STYLE = re.compile(r"\\(?:displaystyle|textstyle|bfseries|bf|rm|large|Large)(?![A-Za-z])\s*")
PUNCTUATION = ".,;:\u3002\uff0c\uff1b"
"""Signs that end a sentence or a clause and are no part of the answer before them."""

_SIGNS = {
    "\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\ufe62": "+", "\uff0b": "+", "\u2044": "/", "\u2215": "/",
    "\uff0f": "/", "\u2236": ":", "\uff1a": ":", "\uff0c": ",", "\uff1b": ";", "\uff0e": ".", "\uff01": "!",
    "\uff08": "(", "\uff09": ")", "\uff3b": "[", "\uff3d": "]", "\uff5b": r"\{", "\uff5d": r"\}", "\uff1d": "=",
    "\uff1c": "<", "\uff1e": ">", "\uff05": "%", "\ufe6a": "%", "\u066a": "%", "\uff04": "$", "\ufe69": "$",
    "\u2217": "*", "\uff0a": "*", "\uff3e": "^", "\uff5c": "|", "\u2223": "|", "\u2019": "'", "\u2032": "'",
    "\u00d7": r"\times ", "\u2715": r"\times ", "\u2a2f": r"\times ", "\u2716": r"\times ",
    "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2219": r"\cdot ", "\u2022": r"\cdot ", "\u30fb": r"\cdot ",
    "\u2027": r"\cdot ", "\u00f7": r"\div ", "\u00b1": r"\pm ", "\u2213": r"\mp ", "\u221e": r"\infty ",
    "\u2264": r"\le ", "\u2a7d": r"\le ", "\u2266": r"\le ", "\u2265": r"\ge ", "\u2a7e": r"\ge ", "\u2267": r"\ge ",
    "\u2260": r"\neq ", "\u2248": r"\approx ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
    "\u2209": r"\notin ", "\u2205": r"\emptyset ", "\u2300": r"\emptyset ", "\u2216": r"\setminus ",
    "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}", "\u2115": r"\mathbb{N}", "\u211a": r"\mathbb{Q}",
    "\u2102": r"\mathbb{C}", "\u00b0": r"^\circ ", "\u00ba": r"^\circ ", "\u02da": r"^\circ ",
    "\u27e8": r"\langle ", "\u27e9": r"\rangle ", "\u230a": r"\lfloor ", "\u230b": r"\rfloor ",
    "\u2308": r"\lceil ", "\u2309": r"\rceil ", "\u2062": "", "\u00ad": "",
    **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", ""),
    **dict.fromkeys("\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
                    " "),
    **dict(zip("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ", (
        rf"\{name} " for name in (
            "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
            "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "Gamma", "Delta",
            "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega")), strict=True)),
}  # fmt: skip
"""Typographic signs and what they are in LaTeX; a command is followed by a space, which ends its name."""
_DASHES = re.compile(r"(?<![0-9A-Za-z)\]}])[\u2010-\u2015\u2043](?=\s*[0-9A-Za-z.\\($\u221a])")
"""Hyphens and dashes that stand for a minus sign; after a letter or a digit one may also be a range, as ``2–3``."""
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+")
_LOWERED_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎]+")
_ROOTS = {"\u221a": r"\sqrt", "\u221b": r"\sqrt[3]", "\u221c": r"\sqrt[4]"}
_ROOT = re.compile(r"[\u221a\u221b\u221c]|\\sqrt(?:\[\d\])?(?=\s*\\[A-Za-z])")
"""A root whose radicand is not in braces, of which math-verify reads ``\\sqrt2``, but not ``\\sqrt\\frac12``."""
_RADICAND = re.compile(r"\s*(\d+(?:\.\d+)?|[A-Za-z]|\\(?!sqrt|[dtc]?frac|left)[A-Za-z]+(?![A-Za-z]|\s*[{(\[]))")
_RADICAND_COMMAND = re.compile(r"\\(?:sqrt(?:\[\d\])?|[dtc]?frac\s*(?:\d|\{(?:[^{}]|\{[^{}]*\})*\}))\s*(?=[{\d])")
"""A command under a root, up to its last argument."""

_SPELLED = {
    "\\!": "", "{,}": ",", "{:}": ":", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac",
    "\\varnothing": "\\emptyset", "\\leqslant": "\\le", "\\geqslant": "\\ge", "\\lt": "<", "\\gt": ">",
    "\\displaystyle": "", "~": " ", "\\mathbb R": "\\mathbb{R}",
}  # fmt: skip
_PERIOD = re.compile(r"(?<![\d.])(\d{0,20}\.\d{0,20}?)(\d)\2{2,20}(?:\.{3,}|\\[lc]?dots(?![A-Za-z])|\u2026)")
"""A decimal that goes on for ever, as ``0.1666...``."""
_SPELLING = re.compile(
    r"\\!\s*|"
    + "|".join(
        re.escape(old) + (r"(?![A-Za-z])" if old[-1].isalpha() and "frac" not in old else "") for old in _SPELLED
    )
)

CURRENCY = r"(?:\\?[$€£¥₹₩₽]|\\(?:euro|pounds|yen|textdollar|dollar)(?![A-Za-z])(?:\{\})?)"
_GAP = r"(?:,|\\[,;: ]|[ '_])"
_DIGITS = rf"(?:\d{{1,3}}(?:{_GAP}\d{{3}})+(?!\d)|\d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?!\d)|\d+)"
"""A whole number, with thousands separators or without; also ``1,00,000``."""
UNSIGNED = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_DEGREE = r"\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:\\(?:text|mathrm)\s*\{\s*[CF]\s*\}|[CF])?"
_DECIMAL = re.compile(rf"([+-]?)\s*{CURRENCY}?\s*([+-]?)\s*({UNSIGNED})\s*(?:{CURRENCY}|{_DEGREE})?\s*")
_POWER = r"([0-9])|\{\s*([+-]?\s*\d{1,4})\s*\}|\(\s*([+-]?\s*\d{1,4})\s*\)"
_SCIENTIFIC = re.compile(rf"([+-]?)\s*(?:({UNSIGNED})\s*(?:\\times|\\cdot|\*)\s*)?10\s*\^\s*(?:{_POWER})")
_E_NOTATION = re.compile(r"([+-]?)(\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})[eE]([+-]?\d{1,4})")
_SIDE = rf"\s*([+-]?)\s*({UNSIGNED})\s*"
_FRACTION = re.compile(
    rf"([+-]?)\s*(?:(\d+)\s*(?:\\[,;: ])?\s*)?\\frac\s*(?:\{{{_SIDE}\}}|([0-9]))\s*(?:\{{{_SIDE}\}}|([0-9]))\s*"
)
_REPEATING = re.compile(r"([+-]?)\s*(\d{0,100})\.(\d{0,100})\\(?:overline|bar|dot)\s*\{(\d{1,100})\}", re.ASCII)
_QUOTIENT = re.compile(rf"(?:([+-]?)\s*(\d+)(?:\s|\\[,;: ])\s*(\d+)|{_SIDE})/{_SIDE}")


def with_latex_signs(text: str) -> str:
    r"""Replace typographic signs by LaTeX: minus signs, dots, roots, raised and lowered digits, fractions, letters.

    Braces are added to roots that lack them.

    >>> with_latex_signs("4√2 · x² − ½"), with_latex_signs("１，０００° ≤ θ")
    ('4\\sqrt{2} \\cdot  x^{2} - \\frac{1}{2}', '1,000^\\circ  \\le  \\theta ')
    """
    if text.isascii():
        return _with_roots(text) if _ROOT.search(text) else text
    text = _RAISED_RUN.sub(lambda run: f"^{{{run[0].translate(_RAISED)}}}", text)
    text = _LOWERED_RUN.sub(lambda run: f"_{{{run[0].translate(_LOWERED)}}}", text)
    text = _DASHES.sub("-", "".join(map(_latex_sign, text)))
    return _with_roots(text) if _ROOT.search(text) else text


def _latex_sign(character: str) -> str:
    """Convert a sign; digits and letters of other widths or weights to ASCII, and ``½`` to a fraction."""
    if character.isascii():
        return character
    if (sign := _SIGNS.get(character)) is not None:
        return sign
    if "VULGAR FRACTION" in unicodedata.name(character, ""):
        above, _, below = unicodedata.normalize("NFKC", character).partition("\u2044")
        return rf"\frac{{{above}}}{{{below}}}" if below else character
    simple = unicodedata.normalize("NFKC", character)
    if simple in _SIGNS:  # a Greek letter of another weight
        return _SIGNS[simple]
    return simple if simple.isascii() and simple.isalnum() and unicodedata.category(character) != "No" else character


def _with_roots(text: str) -> str:
    r"""Write ``√2``, ``√(x+1)`` and ``\sqrt\frac12`` as ``\sqrt{…}``, the innermost first; a root of nothing stays."""
    signs = list(_ROOT.finditer(text))
    if len(text) > MAX_WRAPPED_LENGTH or len(signs) > MAX_ROOTS:
        return text
    for sign in reversed(signs):
        before, after = text[: sign.start()], text[sign.end() :]
        if simple := _RADICAND.match(after):
            inside, rest = simple[1], after[simple.end() :]
        else:
            after = after.lstrip()
            command = _RADICAND_COMMAND.match(after)
            start = command.end() if command else 0
            end = start + 1 if command and after[start].isdigit() else _group_end(after, start)
            if end is None:
                continue
            inside, rest = after[:end] if command else after[1 : end - 1], after[end:]
        text = f"{before}{_ROOTS.get(sign[0], sign[0])}{{{inside}}}{rest}"
    return text


def _group_end(text: str, start: int) -> int | None:
    """Return the place after the group ``{…}`` or ``(…)`` that begins at ``start``; None if there is none."""
    opening = text[start : start + 1]
    closing = {"{": "}", "(": ")"}.get(opening)
    if closing is None:
        return None
    depth = 0
    for index in range(start, len(text)):
        if text[index] in (opening, closing) and text[index - 1 : index] != "\\":
            depth += 1 if text[index] == opening else -1
            if depth == 0:
                return index + 1
    return None


def unwrapped(text: str) -> str:
    r"""Remove what stands around an answer: spaces, Markdown, delimiters, boxes, text commands, a final full stop.

    >>> [unwrapped(text) for text in (r"**$\boxed{5}$.**", r"\(\text{east}\)", r"$a$ or $b$", "{1, 2}")]
    ['5', 'east', '$a$ or $b$', '1, 2']
    """
    text = text.strip()
    if len(text) > MAX_WRAPPED_LENGTH:
        return text
    for _ in range(MAX_WRAPPERS):
        if (inner := _without_one_wrapper(text)) == text:
            break
        text = inner
    return text


def _without_one_wrapper(text: str) -> str:
    bare = text.strip().rstrip(PUNCTUATION).rstrip()
    if bare.endswith("\\"):  # of \, or \;
        bare = text.strip().removesuffix(".")
    if styled := _STYLE.match(bare):
        return bare[styled.end() :]
    if command := _COMMAND.match(bare) or _COLORED.match(bare):
        if _group_end(bare, command.end()) == len(bare):
            return bare[command.end() + 1 : -1].strip()
        return bare
    for opening, closing in _PAIRS:
        inner = bare[len(opening) : -len(closing)]
        if not (bare.startswith(opening) and bare.endswith(closing) and len(bare) > len(opening + closing)):
            continue
        if opening == "{":
            return inner.strip() if _group_end(bare, 0) == len(bare) else bare
        if opening not in inner and closing not in inner and not inner.endswith("\\"):
            return inner.strip()
    return bare


def with_one_spelling(text: str) -> str:
    r"""Replace LaTeX that has the same meaning by one spelling: ``\dfrac`` by ``\frac``, ``{,}`` by a comma."""
    return _SPELLING.sub(lambda match: _SPELLED[match[0].rstrip()], _PERIOD.sub(r"\1\\overline{\2}", text))


def plain_answer(text: str) -> str:
    r"""Return an answer with LaTeX signs, in one spelling, and without wrappers.

    >>> plain_answer("**−1{,}000**."), plain_answer(r"$\dfrac{1}{2}$")
    ('-1,000', '\\frac{1}{2}')
    """
    return unwrapped(with_one_spelling(with_latex_signs(text)))


@dataclass(frozen=True)
class WrittenNumber:
    """A rational number as it is written."""

    value: Fraction
    unit: Fraction = Fraction(0)
    """Value of a 1 in the last place of a decimal with at least ``ROUNDED_DIGITS`` significant digits; else 0."""

    def equals(self, other: WrittenNumber) -> bool:
        """Return whether two numbers are equal; see :func:`are_close`."""
        return are_close(self.value - other.value, max(self.unit, other.unit))


def are_close(difference: Fraction, unit: Fraction) -> bool:
    """Return whether two numbers are equal, or one is a decimal that the other one is rounded or cut off to.

    The difference is zero, or less than a 1 in the last place of a decimal with at least six significant digits. So
    0.333333 is 1/3, 0.3333 is not, and two numbers that such a decimal can express are never taken for each other.
    """
    return difference == 0 or abs(difference) < unit


def decimal_unit(digits: str) -> Fraction:
    """Value of a 1 in the last place of an unsigned decimal without separators, 0 if it has too few digits.

    Zeros at the end do not count, nor do digits after the fifteenth, which may be the noise of a float.

    >>> decimal_unit("0.333333"), decimal_unit("0.3333"), decimal_unit("1000000.0")
    (Fraction(1, 1000000), Fraction(0, 1), Fraction(0, 1))
    """
    integer_digits, _, places = digits.partition(".")
    places = places.rstrip("0")
    significant = len((integer_digits + places).lstrip("0"))
    if not places or significant < ROUNDED_DIGITS:
        return Fraction(0)
    return Fraction(10) ** (max(0, significant - FLOAT_DIGITS) - len(places))


def read_decimal(text: str) -> WrittenNumber | None:
    r"""Read a whole number or a decimal, with sign, currency, degree sign or thousands separators; None for all else.

    The text must have LaTeX signs and no wrappers (:func:`plain_answer`).

    >>> [str(read_decimal(text).value) for text in (r"-\$1,000.50", "073", "1 000", r"90^\circ", ".5")]
    ['-2001/2', '73', '1000', '90', '1/2']
    >>> [read_decimal(text) for text in ("3/4", "1e3", "5:30", "1,2", "5.5.5", "five", "")]
    [None, None, None, None, None, None, None]
    """
    match = _DECIMAL.fullmatch(text.strip())
    if match is None or (match[1] and match[2]):
        return None
    return _decimal(match[1] or match[2], match[3])


def _decimal(sign: str, written: str) -> WrittenNumber | None:
    digits = re.sub(r"[^\d.]", "", written)
    if not digits.isascii() or len(digits) > MAX_WRAPPED_LENGTH:
        return None
    value = Fraction(digits.removesuffix("."))
    return WrittenNumber(-value if sign == "-" else value, decimal_unit(digits))


def read_number(text: str) -> WrittenNumber | None:
    r"""Read a number exactly: what :func:`read_decimal` reads, fractions, mixed numbers, periods, powers of ten.

    >>> [str(read_number(text).value) for text in (r"-\frac{3}{4}", "3 1/2", "1e3", r"3\times 10^{-2}", r"2\frac12")]
    ['-3/4', '7/2', '1000', '3/100', '5/2']
    >>> read_number("50%"), read_number("x"), read_number("1/0")
    (None, None, None)
    """
    text = text.strip()
    if len(text) > MAX_WRAPPED_LENGTH:
        return None
    if (decimal := read_decimal(text)) is not None:
        return decimal
    if match := _E_NOTATION.fullmatch(text):
        return _scaled(_decimal(match[1], match[2]), match[3])
    if match := _SCIENTIFIC.fullmatch(text):
        return _scaled(_decimal(match[1], match[2] or "1"), match[3] or match[4] or match[5])
    if match := _FRACTION.fullmatch(text):
        sign, integer_part = match[1], match[2]
        above = _decimal(match[3] or "", match[4] or match[5])
        below = _decimal(match[6] or "", match[7] or match[8])
    elif match := _REPEATING.fullmatch(text):
        sign, integer_part = match[1], None
        first, period = match[3], match[4]
        # 0.1666… = (16 - 1) / 90
        above = WrittenNumber(Fraction(int(f"{match[2]}{first}{period}") - int(f"0{match[2]}{first}")))
        below = WrittenNumber(Fraction((10 ** len(period) - 1) * 10 ** len(first)))
    elif match := _QUOTIENT.fullmatch(text):
        sign, integer_part = match[1] or "", match[2]
        above = _decimal(match[4] or "", match[3] or match[5])
        below = _decimal(match[6], match[7])
    else:
        return None
    if above is None or below is None or not below.value:
        return None
    value = above.value / below.value
    if integer_part is not None:
        if not 0 <= value < 1:  # "2 3/2" and a product such as 2\frac{3}{2} are not mixed numbers
            return None
        value += int(integer_part)
    return WrittenNumber(-value if sign == "-" else value, above.unit / abs(below.value))


def _scaled(mantissa: WrittenNumber | None, exponent: str) -> WrittenNumber | None:
    power = int(exponent.replace(" ", ""))
    if mantissa is None or abs(power) > MAX_EXPONENT:
        return None
    scale = Fraction(10) ** power
    return WrittenNumber(mantissa.value * scale, mantissa.unit * scale)
