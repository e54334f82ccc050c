"""Read the tests of a programming task from the formats of public data sets, and the program from a response."""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.errors import RewardError
from verl.plugins.sandbox.prime_code.assertions import CONVERSIONS, read_assertion, unchanged
from verl.plugins.sandbox.prime_code.compare import plain, same_text, same_value
from verl.scorers.registry import UnusableTestsError

OPENING = re.compile(
    r"(?P<quote>(?:[ \t]*>)*)"
    r"(?P<margin>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(?P<fence>`{3,}(?=[^`]*$)|~{3,})(?P<info>.*)"
)
"""First line of a fenced block: marks of a quotation, indentation and marks of lists, fence, language."""
LANGUAGE = re.compile(r"[{.\s]*([\w+#.-]+)")
"""Language mark of a fence: ``python title=x``, ``{.python}``."""
LONGEST_PROGRAM = 20_000
"""Characters of a response without fences that is parsed as a program; the parser's time can grow with the square."""
PYTHON = re.compile(r"(?:python|py)[\d.]*")


@dataclass(frozen=True)
class TextCase:
    """Test of a program that reads stdin and writes stdout."""

    stdin: str
    expected: str

    def is_answered_by(self, stdout: str) -> bool:
        """Whether the output is the expected one; see :func:`.compare.same_text`."""
        return same_text(stdout, self.expected)


@dataclass(frozen=True)
class ValueCase:
    """Test that calls functions in the program's namespace and judges the values that they return."""

    request: Mapping[str, object]
    """``{"function": name, "arguments": [...]}`` or ``{"expression": source}``, an expression of calls."""
    expected: tuple[object, ...]
    """Values of which one must be returned."""
    convert: Callable[[Any], object] = unchanged
    """Conversion of the returned value before it is compared."""

    @property
    def stdin(self) -> str:
        """Input of the harness, without the expected values."""
        return json.dumps(self.request)

    def is_answered_by(self, stdout: str) -> bool:
        """Whether the harness wrote a value equal to an expected one; see :func:`.compare.same_value`."""
        try:
            value = self.convert(json.loads(stdout))
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            return False  # no answer, one that cannot be converted, or one made to break a parser
        return any(same_value(value, expected) for expected in self.expected)


Case = TextCase | ValueCase


def extract_code(response: str) -> str | None:
    """Return the last fenced block marked as Python, else the last one without a mark.

    A response without fences is the program if it is one as a whole. Otherwise the result is None.

    Fences are those of Markdown (https://spec.commonmark.org/0.31.2/#fenced-code-blocks): of backticks or tildes,
    indented as in a list, or in a quotation. An unclosed block, as in a truncated response, reaches to the end.
    """
    blocks = dict(_fenced_blocks(response))
    if not blocks.keys() & {"python", ""} and "markdown" in blocks:
        blocks = dict(_fenced_blocks(blocks["markdown"]))
    return blocks.get("python", blocks.get("")) if blocks or not _is_program(response) else response


def _is_program(text: str) -> bool:
    """Whether a text is Python that does something; a word such as ``Yes`` is Python, too."""
    if len(text) > LONGEST_PROGRAM:
        return False
    try:
        with warnings.catch_warnings(action="ignore"):  # of comparisons such as `1 is 2`
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, (ast.Call, ast.Import, ast.ImportFrom, ast.FunctionDef)) for node in ast.walk(tree))


def _fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language of each fenced block, ``python`` for all names of it, and its text without margin."""
    lines = text.split("\n")
    position = 0
    while position < len(lines) - 1:
        opening = OPENING.match(lines[position])
        position += 1
        if opening is None:
            continue
        fence, quotes = opening["fence"], opening["quote"].count(">")
        margin = re.compile(rf"(?:[ \t]*>){{0,{quotes}}}[ \t]{{0,{len(opening['margin'])}}}")
        closing = re.compile(rf"(?:[ \t]*>){{0,{quotes}}}[ \t]*{fence[0]}{{{len(fence)},}}")
        start = position
        while position < len(lines) and not closing.match(lines[position]):
            position += 1
        code = [margin.sub("", line, count=1) for line in lines[start:position]]
        if position < len(lines):
            code.append("")  # the end of the line before the closing fence
        position += 1
        block = "\n".join(code)
        if block.lstrip("\r\n").startswith((" ", "\t")):
            block = textwrap.dedent(block)
        mark = LANGUAGE.match(opening["info"])
        language = mark[1].lower() if mark else ""
        yield "python" if PYTHON.fullmatch(language) else {"md": "markdown"}.get(language, language), block


def read_cases(ground_truth: object) -> list[Case]:
    """Read the tests of a task.

    ====================================================================== =====================================
    ground truth (a dict, or its JSON text)                                test
    ====================================================================== =====================================
    ``{"inputs": [text, ...], "outputs": [text, ...]}``                    stdin and stdout; lists are joined
                                                                           by line ends
    the same with ``"fn_name"``; an input is a list of arguments, or text  call of ``Solution().fn_name`` or
    with one JSON value per line                                           ``fn_name``
    ``{"assert_case": ["assert f(1) == 2", ...]}``                         see :mod:`.assertions`
    ====================================================================== =====================================

    In some data sets with ``fn_name`` each output is the result in a list of one; in others it is the
    result itself. If all outputs of a task are lists of one, both readings are accepted.

    Raises:
        RewardError: the ground truth has none of these forms, or no test.
    """
    truth = _as_dict(ground_truth)
    if asserts := _listed(truth, "assert_case"):
        return _assertions(asserts)
    inputs, outputs = _listed(truth, "inputs"), _listed(truth, "outputs")
    if not inputs or len(inputs) != len(outputs):
        raise RewardError(
            f"the ground truth of a programming task has {len(inputs)} inputs and {len(outputs)} outputs; expected "
            "as many of each, at least one, or 'assert_case'."
        )
    name = truth.get("fn_name")
    if not name:
        return [TextCase(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)]
    results = [_value(output) for output in outputs]
    is_wrapped = all(isinstance(result, list) and len(result) == 1 for result in results)
    return [
        ValueCase({"function": str(name), "arguments": _arguments(i)}, (r, r[0]) if is_wrapped else (r,))
        for i, r in zip(inputs, results, strict=True)
    ]


def _as_dict(ground_truth: object) -> Mapping[str, object]:
    if isinstance(ground_truth, (str, bytes)):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"the ground truth of a programming task is no JSON: {error}") from error
    if not isinstance(ground_truth, Mapping):
        raise RewardError(
            f"the ground truth of a programming task is {type(ground_truth).__name__}; expected an object with "
            "'inputs' and 'outputs', or 'assert_case'."
        )
    return {key: value for key, value in ground_truth.items() if value is not None}


def _listed(truth: Mapping[str, Any], key: str) -> list[object]:
    values = truth.get(key, [])
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise RewardError(f"'{key}' of the ground truth of a programming task is {values!r:.100}; expected a list.")
    return list(values)


def _text(value: object) -> str:
    value = plain(value)
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _arguments(value: object) -> list[Any]:
    value = plain(value)
    if not isinstance(value, str):
        return value if isinstance(value, list) else [value]
    try:
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise RewardError(
            f"the arguments {value!r:.200} of a function are not one JSON value per line: {error}"
        ) from error


def _value(value: object) -> Any:
    if not isinstance(value, str):
        return plain(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # a result that is text


def _assertions(tests: list[object]) -> list[Case]:
    cases: list[Case] = []
    refused = []
    for test in tests:
        try:
            assertion = read_assertion(str(test))
            cases.append(ValueCase({"expression": assertion.expression}, (assertion.expected,), assertion.convert))
        # The last two: too deep; before them: an integer beyond all floats.
        except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
            refused.append((test, error))
    if refused:
        test, error = refused[0]
        raise UnusableTestsError(
            f"{len(refused)} of {len(tests)} tests cannot be used, the first: {test!r:.300} ({error}). What is right "
            "must be decided outside the program, from the value that it returns: expected `assert f(ARGUMENTS) == "
            f"VALUE`, also with {', '.join(CONVERSIONS)} or an index around the call, several of these with `and`, "
            "or `assert f(ARGUMENTS)` and `assert not f(ARGUMENTS)`. Remove these tests, or the row.",
            len(refused),
        )
    return cases
