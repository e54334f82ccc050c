r"""Compare the values of mathematical expressions that math-verify has read: exactly, without a fixed tolerance.

The library decides which parts of two answers belong together (members of sets, ends of intervals, sides of
equations). Its own comparison of two parts rounds to six places, and takes for zero what is below 10⁻¹⁵; here

    rational numbers        are compared as fractions; 0.1 is 1/10
    decimals                also equal what they are rounded from (:func:`.answer_text.are_close`)
    other numbers           differ if they differ within 500 digits
    expressions             differ if they do at a point, and are equal if algebra finds their difference to be zero
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import ModuleType

import sympy
from latex2sympy2_extended.logic import And
from sympy.core.relational import Relational

from verl.scorers.answer_text import are_close, decimal_unit
from verl.scorers.math_verify_private import load_grader

Value = sympy.Basic | sympy.MatrixBase

MAX_DIFFERENCE_DIGITS = 500
"""Digits to which two numbers must agree before they are taken for equal."""
POINTS = (sympy.Rational(3, 7), sympy.Rational(16, 11))
"""The first variable's values where expressions are compared first; each further variable is 2/13 larger."""


def load_comparison() -> Callable[[list[Value | str], list[Value | str]], bool]:
    """Load the grader of math-verify, and return its comparison of a truth and an answer by exact values."""
    grader = load_grader()
    difference_is_zero, solve_and_compare = grader.sympy_symbolic_eq, grader.sympy_solve_and_compare

    def same_symbolically(gold: Value, answer: Value) -> bool:
        # Of two expressions `_is_same` has decided.
        are_expressions = isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)
        return not are_expressions and difference_is_zero(gold, answer)

    def same_solutions(gold: Relational, answer: Relational, *settings: int) -> bool:
        if type(gold) is type(answer) and gold.lhs == answer.lhs and _is_same(grader, gold.rhs, answer.rhs):
            return True  # x = 0.333333 and x = 1/3
        # Of two equations without solutions the library finds all solutions equal.
        return solve_and_compare(gold, answer, *settings) and bool(sympy.solve(gold, gold.free_symbols))

    vars(grader).update(
        sympy_numeric_eq=functools.partial(_is_same, grader),
        sympy_symbolic_eq=same_symbolically,
        sympy_solve_and_compare=same_solutions,
    )
    return functools.partial(_verify, grader)


def _verify(grader: ModuleType, gold: list[Value | str], answer: list[Value | str]) -> bool:
    """Return whether one reading of the answer equals one of the truth."""
    return any(
        grader.verify(left, right, timeout_seconds=None, allow_set_relation_comp=True)
        for left in gold
        for right in answer
        if not (_is_range(left) and _is_list(right)) and not (_is_list(left) and _is_range(right))
    )


def _is_range(value: Value | str) -> bool:
    """Return whether it is an inequality, which the library would take for the list of its ends."""
    if isinstance(value, And):
        return all(map(_is_range, value.args))
    return isinstance(value, Relational) and not isinstance(value, sympy.Eq)


def _is_list(value: Value | str) -> bool:
    return isinstance(value, sympy.FiniteSet | sympy.Tuple) and not any(map(_is_range, value.args))


def _is_same(grader: ModuleType, gold: Value, answer: Value, *_: int) -> bool:
    """Return whether two expressions, or the entries of two matrices, have the same value."""
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        pairs = zip(gold.flat(), answer.flat(), strict=True) if gold.shape == answer.shape else None
        return pairs is not None and all(_is_same(grader, *pair) for pair in pairs)
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    left, right = (grader.safe_sympy_doit(_exact(each)) for each in (gold, answer))
    if left == right:
        return True
    difference: sympy.Expr = left - right
    unit = max(_unit(gold), _unit(answer))
    if isinstance(difference, sympy.Rational):
        return are_close(_fraction(difference), unit)
    if difference.free_symbols:
        return not _differs_at_a_point(difference) and sympy.simplify(difference).is_zero is True
    return _is_small(difference, unit)


def _exact(value: sympy.Expr) -> sympy.Basic:
    """Replace every decimal by the fraction that it is written as, and the letter i by the imaginary unit."""
    fractions = {value_of_float: sympy.Rational(str(value_of_float)) for value_of_float in value.atoms(sympy.Float)}
    return value.xreplace(fractions | {name: sympy.I for name in value.free_symbols if str(name) == "i"})


def _unit(value: sympy.Expr) -> Fraction:
    r"""Value of a 1 in the last place of a decimal such as ``0.123456`` or ``1.23456\times 10^{-7}``, else 0."""
    factors = sympy.Mul.make_args(value)
    decimals = [factor for factor in factors if isinstance(factor, sympy.Float)]
    scale = sympy.Mul(*(factor for factor in factors if not isinstance(factor, sympy.Float))).doit()
    if len(decimals) != 1 or not isinstance(scale, sympy.Rational):
        return Fraction(0)
    return decimal_unit(f"{abs(Decimal(str(decimals[0]))):f}") * abs(_fraction(scale))


def _fraction(value: sympy.Rational) -> Fraction:
    return Fraction(int(value.numerator), int(value.denominator))


def _parts(value: sympy.Expr, point: dict[sympy.Basic, sympy.Basic | float] | None = None) -> list[Fraction] | None:
    """Real and imaginary part of a value to 15 digits, 0 where they cannot be told from 0; None for no number."""
    parts = value.evalf(15, subs=point, maxn=MAX_DIFFERENCE_DIGITS).as_real_imag()
    if not all(isinstance(part, (sympy.Float, sympy.Rational)) for part in parts):
        return None
    # A precision of one bit means that no digit of the value is known: it is below all that was computed.
    return [Fraction(0) if getattr(part, "_prec", 0) == 1 else Fraction(str(part)) for part in parts]


def _is_small(difference: sympy.Expr, unit: Fraction) -> bool:
    """Return whether a number without variables cannot be told from 0, or is below a unit."""
    parts = _parts(difference)
    if parts is None:
        return sympy.simplify(difference).is_zero is True
    real, imaginary = parts
    return imaginary == 0 and are_close(real, unit)


def _differs_at_a_point(difference: sympy.Expr) -> bool:
    """Return whether a difference of two expressions is certainly not 0 at some positive values of its variables."""
    names = sorted(difference.free_symbols, key=str)
    for first in POINTS:
        point: dict[sympy.Basic, sympy.Basic | float] = {
            name: first + sympy.Rational(2 * index, 13) for index, name in enumerate(names)
        }
        parts = _parts(difference, point)
        if parts is not None:
            return any(parts)
    return False
