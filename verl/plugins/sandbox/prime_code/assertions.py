"""Read the assertions of a programming task, so that the program returns values and never judges them.

    assertion                            evaluated in the program     outside, with the JSON of its result
    ``assert sorted(f(1)) == [1, 2]``    ``list(f(1))``               ``sorted(result) == [1, 2]``
    ``assert not f(1)``                  ``not not f(1)``             ``result is False``

A program can redefine every function, and every operator of what it returns. So it evaluates only a call whose
arguments depend on no other code of its own; an expected value or an operator beside the call stays outside.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.plugins.sandbox.prime_code.compare import plain

Conversion = Callable[[Any], object]


@dataclass(frozen=True)
class Assertion:
    """An assertion as a call and its judgement."""

    expression: str
    """Source that the program evaluates."""
    expected: object
    """JSON value that the converted result must equal."""
    convert: Conversion
    """Conversion of the result, a JSON value."""


def unchanged(value: object) -> object:
    """Return the value."""
    return value


def _unique(values: list[object]) -> list[object]:
    """Members of a set in the order of :func:`.compare.plain`."""
    members = {json.dumps(value): value for value in values}
    return [members[name] for name in sorted(members)]


ITERATING: dict[str, Conversion] = {
    "frozenset": _unique, "list": list, "max": max, "min": min, "set": _unique, "sorted": sorted, "sum": sum,
    "tuple": list,
}  # fmt: skip
"""Conversions of any iterable; the program makes a list of what is no JSON, such as a generator."""
CONVERSIONS: dict[str, Conversion] = {
    "abs": abs, "bool": bool, "float": float, "int": int, "len": len, "round": round, **ITERATING
}  # fmt: skip
"""Functions that may stand around the call; they are applied outside."""
CONTAINERS: dict[str, Callable[..., object]] = {
    "float": float, "frozenset": frozenset, "list": list, "set": set, "sorted": sorted, "tuple": tuple
}  # fmt: skip
"""Functions that may make an expected value of a literal."""
MAX_PLACES = 15
"""Largest number of places to which a result is rounded."""

ARGUMENTS = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator,
    ast.Compare, ast.cmpop, ast.IfExp, ast.Call, ast.Name, ast.expr_context, ast.Subscript, ast.Slice, ast.ListComp,
    ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension,
)  # fmt: skip
"""Syntax of arguments."""
ARGUMENT_FUNCTIONS = frozenset(
    {"abs", "bool", "bytearray", "bytes", "chr", "complex", "dict", "enumerate", "float", "frozenset", "int", "iter"}
    | {"len", "list", "max", "min", "ord", "range", "reversed", "set", "sorted", "str", "sum", "tuple", "zip"}
)
"""Names that arguments may have, besides those of their comprehensions."""
EVALUATORS = frozenset({"eval", "exec", "compile", "__import__"})
"""Functions for which a text is code."""


def read_assertion(text: str) -> Assertion:
    """Read an assertion.

    Raises:
        SyntaxError: it is no Python.
        TypeError: it is another statement, or expects what is no JSON.
        ValueError: the program would decide it.
    """
    (statement,) = ast.parse(text.strip()).body
    if not isinstance(statement, ast.Assert):
        raise TypeError(f"it is {type(statement).__name__}, not assert")
    return _claim(statement.test)


def _claim(test: ast.expr) -> Assertion:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        parts = [_claim(part) for part in test.values]
        return Assertion(
            f"({', '.join(part.expression for part in parts)})",
            [part.expected for part in parts],
            lambda values: [part.convert(value) for part, value in zip(parts, values, strict=True)],
        )
    if isinstance(test, ast.Compare):
        return _comparison(test)
    expected = True
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):  # `not` inverts the expected value instead
        test, expected = test.operand, not expected
    if isinstance(test, ast.Compare):
        raise ValueError("it denies a comparison")
    expression, convert = _result(test)
    if convert is unchanged:  # a result that is no JSON has a truth value, too
        return Assertion(f"not not {expression}", expected, unchanged)
    return Assertion(expression, expected, lambda value: bool(convert(value)))


def _comparison(test: ast.Compare) -> Assertion:
    if len(test.ops) != 1 or not isinstance(test.ops[0], (ast.Eq, ast.Is)):
        raise ValueError("it does not compare by == or is")
    left, right = test.left, test.comparators[0]
    try:
        expected, result = _value(right), left
    except ValueError:
        expected, result = _value(left), right
    expected = plain(expected)
    json.dumps(expected)  # raises TypeError
    expression, convert = _result(result)
    return Assertion(expression, expected, convert)


def _value(node: ast.expr) -> object:
    """Value of a literal, or of a container made of one."""
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
    if isinstance(node, ast.Call) and name in CONTAINERS and not node.keywords and len(node.args) <= 1:
        return CONTAINERS[name](*map(_value, node.args))
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError("no side is a literal") from None


def _result(node: ast.expr) -> tuple[str, Conversion]:
    """Split an expression into a call, which the program evaluates, and the conversion of its result."""
    if _is_call(node):
        return ast.unparse(node), unchanged
    if isinstance(node, ast.Subscript):
        expression, inner = _result(node.value)
        key = _key(node.slice)
        return expression, lambda value: _item(inner(value), key)
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
    if not isinstance(node, ast.Call) or name not in CONVERSIONS or node.keywords:
        raise ValueError("the program would decide it")
    argument, *more = node.args
    convert = CONVERSIONS[name]
    if more:
        convert = functools.partial(_rounded, places=_places(name, more))
    expression, inner = _result(argument)
    if inner is unchanged and name in ITERATING:
        return f"list({expression})", convert
    return expression, lambda value: convert(inner(value))


def _is_call(node: ast.expr) -> bool:
    """Whether it is ``f(ARGUMENTS)`` or ``Class(ARGUMENTS).method(ARGUMENTS)``."""
    if not isinstance(node, ast.Call) or not all(map(_is_argument, node.args)):
        return False
    if not all(each.arg and _is_argument(each.value) for each in node.keywords):
        return False
    if not isinstance(node.func, ast.Attribute):
        return isinstance(node.func, ast.Name) and node.func.id not in EVALUATORS
    instance = node.func.value
    if not isinstance(instance, ast.Call) or not isinstance(instance.func, ast.Name) or not _is_call(instance):
        return False
    return instance.func.id[0].isupper() and not node.func.attr.startswith("_")  # f(1).__eq__(2) is no such method


def _is_argument(node: ast.expr) -> bool:
    """Whether the value of an argument depends on literals and builtins alone."""
    nodes = list(ast.walk(node))
    names = [each for each in nodes if isinstance(each, ast.Name)]
    calls = [each for each in nodes if isinstance(each, ast.Call)]
    bound = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return (
        all(isinstance(each, ARGUMENTS) for each in nodes)
        and all(isinstance(each.func, ast.Name) and not each.keywords for each in calls)
        and all(each.id in bound | ARGUMENT_FUNCTIONS for each in names)
    )


def _places(name: str, arguments: list[ast.expr]) -> int:
    """Places of ``round(f(1), 2)``."""
    places = ast.literal_eval(arguments[0])
    if name != "round" or len(arguments) > 1 or type(places) is not int or not 0 <= places <= MAX_PLACES:
        raise ValueError(f"only round has a second argument, from 0 to {MAX_PLACES}")
    return places


def _rounded(value: Any, places: int) -> object:
    return round(value, places)


def _key(node: ast.expr) -> object:
    """Index of a subscript."""
    if isinstance(node, ast.Slice):
        return slice(
            *(None if part is None else ast.literal_eval(part) for part in (node.lower, node.upper, node.step))
        )
    return ast.literal_eval(node)


def _item(value: Any, key: object) -> object:
    if isinstance(value, dict):
        return value[key if isinstance(key, str) else json.dumps(plain(key))]
    return value[key]
