r"""Bounds on the work of comparing two mathematical answers, so that no short text can keep a scorer busy.

The library math-verify parses LaTeX and then compares by symbolic algebra; both can take for ever. An answer that
exceeds a bound is compared as text only, so it is wrong unless it is written as the truth is:

    text     :func:`is_text_bounded`    before parsing: length, nesting, the digits of every number that evaluation
                                        would produce, and operations that are a task rather than its answer
    steps    :func:`limited`            during the comparison: calls of Python functions

Neither is a time, so the same answer gets the same score on a fast and on a slow machine.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Literal, TypeVar

T = TypeVar("T")

MAX_TOKENS = 150
"""Most LaTeX commands, numbers and signs of an answer."""
MAX_NESTING = 10
"""Deepest nesting of groups, such as the fractions of a continued fraction."""
MAX_COSTLY_NESTING = 4
"""Deepest nesting of groups other than arguments of commands: the parser's time grows fast with it."""
MAX_FUNCTIONS = 8
"""Most functions such as ``\\log``."""
MAX_FUNCTION_CHAIN = 3
"""Most functions that are applied to each other, as in ``\\log(\\log(x))``."""
MAX_DIVISIONS = 8
"""Most divisions with ``/``: ``1/2/2`` is nested like a continued fraction."""
MAX_DIGITS = 1000.0
"""Most decimal digits of a number that evaluation produces; the root of one of 3,000 takes seconds."""
MAX_POWER_DIGITS = 6000.0
"""Largest product of these digits and the number of powers and roots."""
MAX_LOGARITHM_DIGITS = 100_000.0
"""Most digits of a number whose logarithm is taken once its factor is its exponent: algebra makes ``log(7^9)`` of
``9 log(7)``."""
MAX_EXPANSION = 50
"""Largest power of a sum with variables or of a function, and largest index of a root."""
MAX_CHOICE = 200
"""Largest sum of the numbers in a binomial coefficient that has variables."""
MAX_STEPS = 200_000
"""Most calls of Python functions in one comparison; a hard one that people write needs 130,000."""

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\S", re.DOTALL)
_FUNCTIONS = frozenset(
    rf"\{name}"
    for name in (
        "log", "ln", "lg", "exp", "sin", "cos", "tan", "csc", "sec", "cot", "arcsin", "arccos", "arctan", "arccsc",
        "arcsec", "arccot", "sinh", "cosh", "tanh", "arsinh", "arcosh", "artanh", "arcsinh", "arccosh", "arctanh",
        "floor", "ceil", "max", "min", "operatorname",
    )
)  # fmt: skip
_TASKS = re.compile(
    r"\\(?:int|iint|iiint|oint|sum|prod|lim|gcd|lcm|det|Gamma|xrightarrow)(?![A-Za-z])"
    r"|\\operatorname\s*\*?\s*\{?\s*(?:gcd|lcm|zeros|ones|eye|rank|diag|rref|norm|trace|tr|cols|rows|hstack|vstack"
    r"|nullspace|orth\w*|eig\w*|diagonalize|svd|SVD|lim|max|min)\b"
)
"""Operations that the parser carries out at once, or that only algebra without bounds can: the task, not its answer."""
_CHOOSE = frozenset({r"\binom", r"\dbinom", r"\tbinom", r"\choose"})
_CHOICE = re.compile(
    r"\\[dt]?binom\s*([0-9A-Za-z]|\{[^{}]*\})\s*([0-9A-Za-z]|\{[^{}]*\})"
    r"|\{([^{}\\]*)\\choose(?![A-Za-z])([^{}\\]*)\}"
)
"""A binomial coefficient and its arguments."""
_VARIABLES_AND_WHOLE_NUMBERS = re.compile(r"[A-DF-HJ-Za-df-hj-z0-9+\-\s{}]*")
_LOGARITHMS = frozenset({r"\log", r"\ln", r"\lg"})
_EXPONENTIALS = frozenset({r"\exp", r"\sinh", r"\cosh"})
_ENDS_OF_TERMS = frozenset("+-=<>,;:&|")
_ENDS_OF_TERMS |= {r"\\", r"\le", r"\ge", r"\leq", r"\geq", r"\cup", r"\cap", r"\in", r"\pm", r"\mp"}
_OPENING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\begin": r"\end", r"\lfloor": r"\rfloor"}
_OPENING |= {r"\lceil": r"\rceil", r"\lvert": r"\rvert", r"\langle": r"\rangle"}
_CLOSING = frozenset(_OPENING.values())


class _TooManySteps(BaseException):
    """A computation made more steps than it may; not an Exception, which the algebra would catch."""


def is_text_bounded(text: str) -> bool:
    """Return whether the work of reading and evaluating an answer is bounded, judged by its text in linear time."""
    if _TASKS.search(text):
        return False
    tokens = _TOKEN.findall(text)
    choices = [" ".join(arguments) for arguments in _CHOICE.findall(text)]
    if sum(token in _CHOOSE for token in tokens) > len(choices) or not all(map(_is_choice_bounded, choices)):
        return False
    if len(tokens) > MAX_TOKENS or tokens.count("/") > MAX_DIVISIONS or tokens.count("|") > 2 * MAX_COSTLY_NESTING:
        return False
    if not _is_nesting_bounded(tokens):
        return False
    digits, powers = _largest_digits(tokens), tokens.count("^") + tokens.count(r"\sqrt")
    return digits <= MAX_DIGITS and digits * powers <= MAX_POWER_DIGITS


def _is_choice_bounded(arguments: str) -> bool:
    """Return whether a binomial coefficient is of whole numbers, or of variables and small ones; others may not end."""
    if _VARIABLES_AND_WHOLE_NUMBERS.fullmatch(arguments) is None:
        return False
    is_number = not any(character.isalpha() for character in arguments)
    return is_number or sum(map(float, re.findall("[0-9]+", arguments))) <= MAX_CHOICE


def _is_nesting_bounded(tokens: list[str]) -> bool:
    depth = costly = functions = chain = 0
    groups: list[bool] = []  # open groups: whether each is costly
    before = ""
    for token in tokens:
        if token in _OPENING:
            # An argument of \frac or \\sqrt cannot be read in two ways; any other group can.
            is_costly = not (token == "{" and (before == "}" or (before[:1] == "\\" and before not in _FUNCTIONS)))
            groups.append(is_costly)
            depth, costly = max(depth, len(groups)), max(costly, sum(groups))
        elif token in _CLOSING:
            if groups:
                groups.pop()
            chain = 0
        elif token in _FUNCTIONS:
            functions, chain = functions + 1, chain + 1
            if chain > MAX_FUNCTION_CHAIN:
                return False
        elif token in _ENDS_OF_TERMS:
            chain = 0
        before = token
    return depth <= MAX_NESTING and costly <= MAX_COSTLY_NESTING and functions <= MAX_FUNCTIONS


Role = Literal["factor", "argument", "exponent", "exponential", "index", "subscript"]
"""Role of an operand in its group: ``2``, ``\\log 2``, ``^2``, ``\\exp 2``, ``\\sqrt[2]``, ``_2``."""
_ROLES: dict[str, list[Role]] = {
    **{name: ["exponential"] for name in _EXPONENTIALS},
    **{name: ["exponential", "exponential"] for name in _CHOOSE},
}
"""Roles of the operands after a command."""


@dataclass
class _Group:
    """Bounds on log10 of the values in a group so far, each the larger of that of the value and of its inverse."""

    role: Role
    terms: float = -math.inf
    """Sum of the finished terms."""
    factors: float = 0.0
    """Product of the finished factors of the current term."""
    last: float = 0.0
    """The current factor, which a power or a factorial after it raises."""
    is_last_sum: bool = False
    """True if algebra expands powers of the current factor."""
    is_last_argument: bool = False
    """True if the current factor is the argument of a logarithm, or a group that has logarithms."""
    coefficient: float = 0.0
    """Product of the finished factors of the current term without such ones."""
    argument: float = 0.0
    """Largest argument of a logarithm in the current term."""
    power: float = 0.0
    """Largest argument of a logarithm in a finished term, raised to the coefficient of the term."""
    count: int = 0
    """Number of finished terms."""
    has_variable: bool = False
    has_function: bool = False

    @property
    def is_sum(self) -> bool:
        return self.has_variable and (self.count > 1 or self.has_function)

    def take(self, role: Role, digits: float, is_sum: bool = False, power: float = 0.0) -> None:
        """Add an operand; ``power`` is that of a group."""
        if role in ("factor", "argument", "exponential"):
            self.factors += self.last
            if not self.is_last_argument:
                self.coefficient += self.last
            self.last, self.is_last_sum = digits, is_sum
            self.is_last_argument = role == "argument" or power > 0
        self.argument = max(self.argument, power, digits if role == "argument" else 0.0)
        if role == "exponential":
            self.last = math.log10(math.e)
        if role in ("exponent", "exponential"):
            self.raise_to(digits)
        if role == "index" and digits > math.log10(MAX_EXPANSION):
            self.last = math.inf

    def end_term(self) -> float:
        self.take("factor", 0.0)
        if self.argument:
            self.power = max(self.power, self.argument * 10 ** min(self.coefficient, 9.0))
        larger, smaller = max(self.terms, self.factors), min(self.terms, self.factors)
        self.terms, self.factors = larger + math.log10(1 + 10 ** max(smaller - larger, -300.0)), 0.0
        self.coefficient = self.argument = 0.0
        self.count += 1
        return self.terms if self.power <= MAX_LOGARITHM_DIGITS else math.inf

    def raise_to(self, digits: float) -> None:
        """Raise the last factor to a power whose log10 is at most ``digits``."""
        is_expansion = self.is_last_sum and digits > math.log10(MAX_EXPANSION)
        self.last = math.inf if is_expansion else max(self.last, math.log10(2)) * 10 ** min(digits, 9.0)


def _largest_digits(tokens: list[str]) -> float:
    """Bound on the decimal digits of every number in an answer, were it evaluated; a variable counts like 2."""
    group, outer = _Group(role="factor"), []  # of the outer groups also the roles of their next operands
    largest = 0.0
    roles: list[Role] = []  # of the next operands; every other one is a factor
    before = ""
    for token in tokens:
        if token in _OPENING:
            is_index = token == "[" and before == r"\sqrt"
            role: Role = "index" if is_index else roles.pop() if roles else "factor"
            outer.append((group, roles))
            group, roles = _Group(role=role), []
        elif token in _CLOSING and outer:
            inner, (group, roles) = group, outer.pop()
            group.take(inner.role, inner.end_term(), is_sum=inner.is_sum, power=inner.power)
            group.has_variable |= inner.has_variable
            group.has_function |= inner.has_function
        elif token in _ENDS_OF_TERMS:
            if token not in "+-" or not roles:  # a sign of an exponent
                group.end_term()
                roles = []
        elif token in "^_":
            roles.append("exponent" if token == "^" else "subscript")  # \log_2 7: the argument comes after it
        elif token == "!":
            group.raise_to(group.last)
        elif token in _ROLES:
            roles = [*_ROLES[token]]
        elif token in _FUNCTIONS:
            group.take("factor", 0.0, is_sum=True)
            group.has_function = True
            if token in _LOGARITHMS:
                roles = ["argument"]
        elif token[0] != "\\" or token == r"\pi":
            group.has_variable |= token.isalpha()
            role = roles.pop() if roles else "factor"
            # A product with the logarithm of a variable stays as it is.
            group.take("factor" if role == "argument" and token.isalpha() else role, _digits(token))
        largest = max(largest, group.factors + group.last, group.terms)
        before = token
    return max([largest, *(each.end_term() for each in (group, *(waiting for waiting, _ in outer)))])


def _digits(token: str) -> float:
    value = float(token) if token.isascii() and token[0].isdigit() else math.e if token == "e" else 2.0
    return abs(math.log10(value)) if 0 < value < math.inf else 0.0 if value == 0 else float(len(token))


def limited(compute: Callable[[], T], otherwise: T) -> T:
    """Return the result of ``compute``, or ``otherwise`` if that takes more than ``MAX_STEPS`` calls of functions.

    A trace function of a debugger or of a coverage measurement is suspended meanwhile.
    """
    from sympy.core.cache import clear_cache

    steps, limit = 0, MAX_STEPS

    def count(frame: FrameType, *_: object) -> None:
        nonlocal steps, limit
        steps += 1
        # A generator is entered also when it is thrown away, and the error would be lost there.
        if steps >= limit and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            # The error passes through clean-up code, which must be able to call functions.
            limit = steps + MAX_STEPS
            raise _TooManySteps

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return compute()
    except _TooManySteps:
        clear_cache()  # of expressions whose properties were being computed, which it would take for unknown
        return otherwise
    finally:
        sys.settrace(before)
