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

from verl.utils.reward_score.answer_text import are_close, decimal_unit
from verl.utils.reward_score.math_verify_private import load_grader

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

    grader.sympy_numeric_eq = functools.partial(_is_same, grader)
    grader.sympy_symbolic_eq = same_symbolically
    grader.sympy_solve_and_compare = same_solutions
    return functools.partial(_verify, grader)


def _verify(grader: ModuleType, gold: list[Value | str], answer: list[Value | str]) -> bool:
    """Whether one reading of the answer equals one of the truth."""
    return any(
        grader.verify(left, right, timeout_seconds=None, allow_set_relation_comp=True)
        for left in gold
        for right in answer
        if not (_is_range(left) and _is_list(right)) and not (_is_list(left) and _is_range(right))
    )


def _is_range(value: Value | str) -> bool:
    """Whether it is an inequality, which the library would take for the list of its ends."""
    if isinstance(value, And):
        return all(map(_is_range, value.args))
    return isinstance(value, Relational) and not isinstance(value, sympy.Eq)


def _is_list(value: Value | str) -> bool:
    return isinstance(value, sympy.FiniteSet | sympy.Tuple) and not any(map(_is_range, value.args))


def _is_same(grader: ModuleType, gold: Value, answer: Value, *_: int) -> bool:
    """Whether two expressions, or the entries of two matrices, have the same value."""
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        pairs = zip(gold.flat(), answer.flat(), strict=True) if gold.shape == answer.shape else None
        return pairs is not None and all(_is_same(grader, *pair) for pair in pairs)
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    left, right = (grader.safe_sympy_doit(_without_floats(each)) for each in (gold, answer))
    if left == right:
        return True
    difference = left - right
    unit = max(_unit(gold), _unit(answer))
    if difference.is_Rational:
        return are_close(Fraction(int(difference.p), int(difference.q)), unit)
    if difference.free_symbols:
        return not _differs_at_a_point(difference) and sympy.simplify(difference).is_zero is True
    return _is_small(difference, unit)


def _without_floats(value: sympy.Expr) -> sympy.Expr:
    """Replace every decimal by the fraction that it is written as."""
    return value.xreplace({number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)})


def _unit(value: sympy.Expr) -> Fraction:
    r"""Value of a 1 in the last place of a decimal such as ``0.123456`` or ``1.23456\times 10^{-7}``, else 0."""
    factors = sympy.Mul.make_args(value)
    decimals = [factor for factor in factors if isinstance(factor, sympy.Float)]
    scale = sympy.Mul(*(factor for factor in factors if not isinstance(factor, sympy.Float))).doit()
    if len(decimals) != 1 or not scale.is_Rational:
        return Fraction(0)
    return decimal_unit(f"{abs(Decimal(str(decimals[0]))):f}") * abs(Fraction(int(scale.p), int(scale.q)))


def _is_small(difference: sympy.Expr, unit: Fraction = Fraction(0)) -> bool:
    """Whether a number without variables cannot be told from 0, or is below a unit."""
    value = difference.evalf(15, maxn=MAX_DIFFERENCE_DIGITS)
    parts = value.as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return sympy.simplify(difference).is_zero is True
    # A precision of one bit means that no digit of the value is known: it is below all that was computed.
    if all(part == 0 or (part.is_Float and part._prec == 1) for part in parts):
        return True
    return bool(unit) and parts[1] == 0 and are_close(Fraction(str(parts[0])), unit)


def _differs_at_a_point(difference: sympy.Expr) -> bool:
    """Whether a difference of two expressions is certainly not 0 where its variables have certain positive values."""
    names = sorted(difference.free_symbols, key=str)
    for first in POINTS:
        point = {name: first + sympy.Rational(2 * place, 13) for place, name in enumerate(names)}
        value = difference.evalf(15, subs=point, maxn=MAX_DIFFERENCE_DIGITS)
        parts = value.as_real_imag()
        if all(part.is_Float or part.is_Rational for part in parts):
            return not all(part == 0 or (part.is_Float and part._prec == 1) for part in parts)
    return False
