"""A calculator."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from verl.base.types import JsonObject
from verl.tools.base_tool import BaseTool, schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

MAX_DIGITS = 1000
"""Digits of a whole number above which the calculator gives up."""


def _round(value: float, digits: int = 0) -> float:
    # round(1, -10**9) would compute a power of a billion digits.
    return round(value, max(-MAX_DIGITS, min(int(digits), MAX_DIGITS))) if digits else round(value)


OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
FUNCTIONS: dict[str, Callable[..., object]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "log2": math.log2, "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": math.asin,
    "acos": math.acos, "atan": math.atan, "floor": math.floor, "ceil": math.ceil, "gcd": math.gcd, "lcm": math.lcm,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}
LONGEST = 1000
"""Characters of an expression."""


class CalculatorError(ValueError):
    """An expression that cannot be computed; the message is for the model."""


class CalculatorTool(BaseTool):
    """Compute an arithmetic expression. For a wrong one the answer says what is wrong, for the model to correct it."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """See :meth:`BaseTool.get_openai_tool_schema`."""
        return self.tool_schema or schema(
            "calculator",
            "Compute an arithmetic expression, such as (3 + 4) * 2 ** 5 / sqrt(16).",
            ["expression"],
            expression={"type": "string", "description": f"Numbers, + - * / // % ** and {', '.join(FUNCTIONS)}."},
        )

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: object
    ) -> tuple[ToolResponse, float, JsonObject]:
        """Compute ``parameters["expression"]``."""
        try:
            text = show(compute(parameters["expression"]))
        except CalculatorError as error:
            return ToolResponse(text=f"Error: {error}"), 0.0, {"calculator_error": 1.0}
        return ToolResponse(text=text), 0.0, {"calculator_error": 0.0}


def compute(expression: str) -> int | float:
    """Return the value of an expression.

    >>> compute("(3 + 4) * 2^2")
    28

    Raises:
        CalculatorError: it is no expression, or has no finite value of a reasonable size.
    """
    if len(expression) > LONGEST:
        raise CalculatorError(f"the expression has {len(expression)} characters; {LONGEST} are allowed")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise CalculatorError(f"this is no arithmetic expression: {expression}") from error
    except ZeroDivisionError as error:
        raise CalculatorError("division by zero") from error
    except CalculatorError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise CalculatorError(str(error)) from error
    return value


def show(value: int | float) -> str:
    """Write a value, a float with 12 digits, which hides rounding errors.

    >>> show(0.1 + 0.2), show(3.0), show(7)
    ('0.3', '3', '7')
    """
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _binary(op, _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _checked_size(FUNCTIONS[name](*map(_value, arguments)))
    raise CalculatorError(f"'{ast.unparse(node)}' is no arithmetic; allowed are numbers, + - * / // % ** and functions")


def _binary(op: ast.operator, left: float, right: float) -> int | float:
    # The digits of a whole power are counted before it is computed: 9 ** 9 ** 9 has 370 million.
    is_integer_power = isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int)
    if is_integer_power and right > 0 and abs(left) > 1 and right * math.log10(abs(left)) > MAX_DIGITS:
        raise CalculatorError(f"the result has more than {MAX_DIGITS} digits")
    return _checked_size(OPERATORS[type(op)](left, right))


def _checked_size(value: Any) -> int | float:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise CalculatorError("the result is no finite real number")
    if isinstance(value, int) and value.bit_length() > MAX_DIGITS * math.log2(10):
        raise CalculatorError(f"the result has more than {MAX_DIGITS} digits")
    return value
