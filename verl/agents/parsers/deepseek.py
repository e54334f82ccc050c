"""The formats of DeepSeek: calls between special tokens (V3, R1, V3.1), and tags (V3.2 and later)."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    read_json,
    read_value,
    refusing,
    require_first,
    skip_blanks,
)

BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
"""Around all calls of a turn (V3, R1, V3.1)."""
INVOKE, END_INVOKE = "<｜DSML｜invoke", "</｜DSML｜invoke>"
_AROUND_INVOKES = re.compile(r"</?｜DSML｜(?:function_calls|tool_calls)>")
"""Around all calls of a turn (V3.2 and later), under either of its two names."""
_NAME = re.compile(r'\s+name="([^"]+)"\s*>')
_PARAMETER = re.compile(r'<｜DSML｜parameter\s+name="([^"]+)"(?:\s+string="(true|false)")?\s*>')
"""``string`` says whether the value is text as it stands or JSON."""
_END_PARAMETER = "</｜DSML｜parameter>"
_AFTER_VALUE = re.compile(rf"{_PARAMETER.pattern}|{END_INVOKE}")
"""Text that may follow a value whose end tag the model left out."""


@ToolParser.register("deepseek")
class DeepSeekToolParser(TextToolParser):
    """Calls of DeepSeek V3, R1, V3.1, and of V3.2 and later, which mark each parameter as text or as JSON."""

    starts = (*_AROUND, BEGIN, "<｜DSML｜")

    def read(self, text: str, tools: Mapping[str, Properties]) -> Reading:
        """See :meth:`TextToolParser.read`."""
        if "<｜DSML｜" in text:
            content, calls, malformed = read_calls(text, INVOKE, END_INVOKE, _read_invoke)
            if not calls and not malformed:
                return read_calls(text, "<｜DSML｜", "</｜DSML｜", refusing(f'no {INVOKE} name="..."> in the block'))
            return (content if malformed else _AROUND_INVOKES.sub("", content)), calls, malformed
        content, calls, malformed = read_calls(text, BEGIN, END, _read_one)
        if not calls and not malformed and _AROUND[0] in text:
            return read_calls(text, *_AROUND, refusing(f"no {BEGIN} follows"))
        if not malformed:
            for marker in _AROUND:
                content = content.replace(marker, "")
        return content, calls, malformed


def _read_one(text: str, position: int) -> tuple[FunctionCall, int]:
    separator = text.find(SEPARATOR, position)
    if separator < 0 or END in text[position:separator] or BEGIN in text[position:separator]:
        raise NoCallError(f"no {SEPARATOR} in the call")
    first, position = text[position:separator].strip(), separator + len(SEPARATOR)
    # V3 and R1: "function" SEPARATOR name, then the arguments as a block of JSON. V3.1: name SEPARATOR arguments.
    if text[skip_blanks(text, position) : skip_blanks(text, position) + 1] in ("{", "[", '"'):
        value, position = read_json(text, position)
        return make_call(first, value), expect(text, position, END)
    fence = text.find("```", position)
    if fence < 0 or END in text[position:fence]:
        raise NoCallError("the arguments are neither a JSON object nor a block of ```json")
    name = text[position:fence].strip()
    value, position = read_json(text, fence + len("```json") if text.startswith("```json", fence) else fence + 3)
    return make_call(name, value), expect(text, expect(text, position, "```"), END)


def _read_invoke(text: str, position: int) -> tuple[FunctionCall, int]:
    head = _NAME.match(text, position)
    if head is None:
        raise NoCallError(f'no name="..."> follows {INVOKE}')
    arguments, position = {}, head.end()
    while not text.startswith(END_INVOKE, position := skip_blanks(text, position)):
        parameter = _PARAMETER.match(text, position)
        if parameter is None:
            raise NoCallError(f"neither a parameter nor {END_INVOKE} at character {position}")
        require_first(parameter[1], arguments)
        what = f"the parameter {parameter[1]!r}"
        value, position = read_value(text, parameter.end(), _END_PARAMETER, _AFTER_VALUE, what)
        arguments[parameter[1]] = _json_value(value, parameter[1]) if parameter[2] == "false" else value
    return make_call(head[1], arguments), position + len(END_INVOKE)


def _json_value(text: str, name: str) -> object:
    value, position = read_json(text)
    if text[position:].strip():
        raise NoCallError(f"the parameter '{name}' is no JSON: {text[position:].strip()[:20]!r} follows the value")
    return value
