"""Formats whose arguments stand between tags, without types of their own: Qwen3-Coder and GLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from verl.agents.parsers.base import (
    FunctionCall,
    NoCallError,
    Properties,
    Reading,
    TextToolParser,
    ToolParser,
    expect,
    make_call,
    read_calls,
    read_value,
    refusing,
    require_first,
    skip_blanks,
)
from verl.base.types import JsonMapping, JsonObject

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""Chat templates write these three as Python does."""
_AFTER_PARAMETER = re.compile(
    r"\n<parameter=[^<>\n]+>|</function>\s*(?:</?tool_call>|<function=|\Z)|</tool_call>\s*<tool_call>\s*<function="
)
"""Text that may follow a value of Qwen3-Coder whose end tag the model left out."""
_AFTER_ARG_VALUE = re.compile(r"<arg_key>[^<]+</arg_key>\s*<arg_value>|</tool_call>\s*(?:<tool_call>|\Z)")
"""Text that may follow a value of GLM whose end tag the model left out."""
_TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
"""Names of JSON schema for the types that ``json.loads`` returns."""


@ToolParser.register("qwen3_coder")
class Qwen3CoderToolParser(TextToolParser):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen 3.5.

    Models leave the outer tag out at times; the inner ones make the call. A value without ``</parameter>`` ends where
    a line begins with another parameter, or at the end of the function.
    """

    starts = ("<tool_call>", "<function=")

    def opening(self, names: Sequence[str]) -> str:
        """See :meth:`ToolParser.opening`."""
        return "<tool_call>\n<function=" + (f"{names[0]}>\n" if len(names) == 1 else "")

    def read(self, text: str, tools: Mapping[str, Properties]) -> Reading:
        """See :meth:`TextToolParser.read`."""

        def read_one(text: str, position: int) -> tuple[FunctionCall, int]:
            name, position = _name_until(text, position, ">", "the name of the function")
            properties = tools.get(name, {})
            arguments: JsonObject = {}
            while not text.startswith("</function>", position := skip_blanks(text, position)):
                position = expect(text, position, "<parameter=")
                key, position = _name_until(text, position, ">", "the name of a parameter")
                require_first(key, arguments)
                value, position = read_value(text, position, "</parameter>", _AFTER_PARAMETER, f"the value of {key!r}")
                # The template puts each value on lines of its own.
                arguments[key] = typed(value.removeprefix("\n").removesuffix("\n"), properties.get(key))
            return make_call(name, arguments), position + len("</function>")

        content, calls, malformed = read_calls(text, "<function=", "</function>", read_one)
        if not calls and not malformed and "<tool_call>" in text:
            return read_calls(text, "<tool_call>", "</tool_call>", refusing("no <function=name> follows <tool_call>"))
        return (re.sub(r"</?tool_call>", "", content) if calls and not malformed else content), calls, malformed


@ToolParser.register("glm")
class GlmToolParser(TextToolParser):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM 4.5 and later.

    A value without ``</arg_value>`` ends at the key of another parameter, or at the end of the call.
    """

    starts = ("<tool_call>",)
    call_end = "</tool_call>"

    def opening(self, names: Sequence[str]) -> str:
        """See :meth:`ToolParser.opening`."""
        return "\n<tool_call>" + (names[0] if len(names) == 1 else "")

    def read(self, text: str, tools: Mapping[str, Properties]) -> Reading:
        """See :meth:`TextToolParser.read`."""

        def read_one(text: str, position: int) -> tuple[FunctionCall, int]:
            name, position = _name_until(text, position, "<", "the name of the function")
            name, position = name.strip(), position - 1
            properties = tools.get(name, {})
            arguments: JsonObject = {}
            while not text.startswith("</tool_call>", position := skip_blanks(text, position)):
                key, position = _name_until(text, expect(text, position, "<arg_key>"), "</arg_key>", "a key")
                require_first(key, arguments)
                position = expect(text, position, "<arg_value>")
                value, position = read_value(text, position, "</arg_value>", _AFTER_ARG_VALUE, f"the value of {key!r}")
                arguments[key] = typed(value, properties.get(key))
            return make_call(name, arguments), position + len("</tool_call>")

        return read_calls(text, "<tool_call>", "</tool_call>", read_one)


def _name_until(text: str, position: int, end: str, what: str) -> tuple[str, int]:
    """Return a name of one line without ``<``, and the place after its ``end``."""
    end_of_name = text.find(end, position)
    name = text[position:end_of_name].strip()
    if end_of_name < 0 or "<" in name or "\n" in name:
        raise NoCallError(f"no {end!r} ends {what}")
    return name, end_of_name + len(end)


def typed(text: str, schema: Mapping[str, object] | None) -> object:
    """Return the value that a text stands for under a JSON schema; the text itself where the schema does not know.

    A text that is no value of the wanted type stays a text, so that the check against the schema reports it.

    A number may have a plus sign, which JSON does not know, unless it may be a text too.

    >>> typed("12", {"type": "integer"}), typed("12", {"type": "string"}), typed("x", {"type": "integer"})
    (12, '12', 'x')
    """
    types = _types(schema or {})
    if not types - {"string"}:
        return text
    stripped = text.strip()
    if "string" not in types:
        stripped = re.sub(r"^\+(?=\d)", "", stripped)
    try:
        value = _PYTHON_WORDS[stripped] if stripped in _PYTHON_WORDS else json.loads(stripped)
    except (ValueError, RecursionError):
        return text
    kind = "null" if value is None else _TYPE_NAMES[type(value)]
    matches = kind in types or (kind == "integer" and "number" in types)
    return value if matches or "string" not in types else text


def _types(schema: JsonMapping) -> set[str]:
    """Names of the JSON types that a schema allows."""
    kinds = schema.get("type", [])
    types = {kinds} if isinstance(kinds, str) else set(kinds)
    for key in ("anyOf", "oneOf"):
        for variant in schema.get(key, ()):
            types |= _types(variant)
    if not types and "enum" in schema:
        types = {"null" if value is None else _TYPE_NAMES.get(type(value), "string") for value in schema["enum"]}
    return types | ({"null"} if schema.get("nullable") else set())
