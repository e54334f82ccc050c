"""Calls as a list of Python calls: Llama 4, Llama 3.2 with its small models, ToolACE."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Mapping, Sequence
from contextlib import suppress

from verl.agents.parsers.base import (
    MAX_MALFORMED,
    FunctionCall,
    MalformedCall,
    NoCallError,
    Properties,
    Reading,
    TextToolParser,
    ToolParser,
    make_call,
    require_first,
)

_START, _END = "<|python_start|>", "<|python_end|>"
_LOOKS_LIKE_CALLS = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_JSON_WORDS = {"true": True, "false": False, "null": None}
"""Models write these three as JSON does, though the call is Python."""
_RENAMED = "_python_keyword_"
"""Stands before a keyword of Python that is a name here, while Python's own parser reads the calls."""


@ToolParser.register("pythonic")
class PythonicToolParser(TextToolParser):
    """``[get_weather(city="Paris", days=3), get_time()]`` as the whole response, with arguments by name.

    Names may be keywords of Python: ``[send(from="Rome", class="first")]``. A malformed call does not affect the others
    of the list.
    """

    starts = ("[", _START)

    def opening(self, names: Sequence[str]) -> str:
        """See :meth:`ToolParser.opening`."""
        return f"[{names[0]}(" if len(names) == 1 else "["

    def read(self, text: str, tools: Mapping[str, Properties]) -> Reading:
        """See :meth:`TextToolParser.read`."""
        before, tag, body = text.partition(_START)
        if _LOOKS_LIKE_CALLS.match(text):
            before, tag, body = "", "", text
        elif not tag:
            return text, [], []
        body = body.strip().removesuffix(_END)
        try:
            nodes = _elements(body)
        except NoCallError as error:
            return text, [], [MalformedCall(tag + body, str(error))]
        calls: list[FunctionCall] = []
        malformed: list[MalformedCall] = []
        for node, source in nodes:
            try:
                calls.append(_call(node))
            except (NoCallError, RecursionError) as error:
                malformed.append(MalformedCall(source, str(error)))
        content = " ".join([before, *(call.text for call in malformed)]) if calls else text
        return content, calls, malformed[:MAX_MALFORMED]


def _elements(text: str) -> list[tuple[ast.expr, str]]:
    """Return the elements of a list of calls, each with its text."""
    try:
        source, tree = _parsed(text)
    except SyntaxError as error:
        raise NoCallError(f"no Python expression: {error.msg} at character {error.offset}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise NoCallError(f"no Python expression: {str(error) or 'nested too deeply'}") from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise NoCallError("the calls must be one list: [name(key=value, ...)]")
    return [(node, (ast.get_source_segment(source, node) or "").replace(_RENAMED, "")) for node in tree.elts]


def _parsed(text: str) -> tuple[str, ast.expr]:
    """Return the text that Python's parser accepts, with keywords renamed if need be, and its tree."""
    try:
        return text, ast.parse(text, mode="eval").body
    except SyntaxError:
        with suppress(SyntaxError):
            renamed = _with_renamed_keywords(text)
            return renamed, ast.parse(renamed, mode="eval").body
        raise


def _with_renamed_keywords(text: str) -> str:
    """Rename keywords of Python that stand for a tool, a part of its dotted name, or a parameter."""
    try:
        tokens = [
            token
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)
        ]
    except (tokenize.TokenError, SyntaxError):
        return text  # which Python's parser refuses with a better reason
    lines = text.split("\n")
    for before, token, after in reversed(list(zip(tokens, tokens[1:], tokens[2:], strict=False))):
        is_name = before.string == "." or after.string in ("(", ".") or (before.string in "(," and after.string == "=")
        if token.type == tokenize.NAME and keyword.iskeyword(token.string) and is_name:
            row, column = token.start
            lines[row - 1] = f"{lines[row - 1][:column]}{_RENAMED}{lines[row - 1][column:]}"
    return "\n".join(lines)


def _call(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call):
        raise NoCallError(f"{ast.unparse(node)[:50]!r} in the list is no call")
    name = ast.unparse(node.func).replace(_RENAMED, "")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise NoCallError(f"{name[:50]!r} is no name of a function")
    if node.args:
        raise NoCallError(f"an argument of {name} has no name: write {name}(key=value)")
    arguments = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise NoCallError(f"{name} has ** in its arguments")
        key = argument.arg.removeprefix(_RENAMED)
        require_first(key, arguments)
        arguments[key] = _value(argument.value, key)
    return make_call(name, arguments)


def _value(node: ast.expr, key: str) -> object:
    """Value of a literal, or of the words true, false and null, which models take from JSON."""
    match node:
        case ast.Name(id=name) if name in _JSON_WORDS:
            return _JSON_WORDS[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element, key) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key_node, key): _value(value, key) for key_node, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else +number
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
    raise NoCallError(f"the value of {key!r} is no literal")


def _key(node: ast.expr | None, key: str) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise NoCallError(f"a key in the value of {key!r} is no text")
    return node.value
