"""Formats whose calls are JSON objects: Hermes (and Qwen), Llama 3, Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from verl.agents.parsers.base import (
    MAX_MALFORMED,
    FunctionCall,
    MalformedCall,
    NoCallError,
    Properties,
    Reading,
    TextToolParser,
    ToolParser,
    call_of_object,
    expect,
    make_call,
    read_calls,
    read_json,
    skip_blanks,
)


@ToolParser.register("hermes")
class HermesToolParser(TextToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes 2 and 3, Qwen 2.5, Qwen 3."""

    starts = ("<tool_call>",)
    call_end = "</tool_call>"

    def opening(self, names: Sequence[str]) -> str:
        """See :meth:`ToolParser.opening`."""
        return "<tool_call>\n" + _opened(names, "arguments")

    def read(self, text: str, tools: Mapping[str, Properties]) -> Reading:
        """See :meth:`TextToolParser.read`."""
        return read_calls(text, "<tool_call>", "</tool_call>", self._read_one)

    @staticmethod
    def _read_one(text: str, position: int) -> tuple[FunctionCall, int]:
        value, position = read_json(text, position)
        return call_of_object(value, "arguments"), expect(text, position, "</tool_call>")


@ToolParser.register("llama3_json")
class Llama3JsonToolParser(TextToolParser):
    """``{"name": ..., "parameters": {...}}`` as the whole response: Llama 3.1 to 3.3.

    Several calls are separated by ``;``. After ``<|python_tag|>`` anything else is a malformed call; without it, a
    response that is JSON of another kind is an answer.
    """

    starts = ("<|python_tag|>", "{")

    def opening(self, names: Sequence[str]) -> str:
        """See :meth:`ToolParser.opening`."""
        return _opened(names, "parameters")

    def read(self, text: str, tools: Mapping[str, Properties]) -> Reading:
        """See :meth:`TextToolParser.read`."""
        before, tag, body = text.partition("<|python_tag|>")
        if not tag or before.lstrip().startswith("{"):  # the tag may stand in an argument
            before, tag, body = "", "", text
            if not self._looks_like_a_call(text):
                return text, [], []
        calls: list[FunctionCall] = []
        position = 0
        try:
            while True:
                value, position = read_json(body, position)
                call = call_of_object(value, "parameters")
                if "parameters" not in value and call.name not in tools:  # an answer may have a name, too
                    raise NoCallError(f"the call has no 'parameters', and {call.name!r:.50} is no tool")
                calls.append(call)
                position = skip_blanks(body, position)
                if position >= len(body):
                    return before, calls, []
                position = expect(body, position, ";")
        except NoCallError as error:
            # One of several calls is broken: none is made, for it is not known where the next would begin.
            return text, [], [MalformedCall(tag + body, str(error))]

    @staticmethod
    def _looks_like_a_call(text: str) -> bool:
        return text.lstrip().startswith("{") and re.search(r'"(name|parameters)"\s*:', text) is not None


@ToolParser.register("mistral")
class MistralToolParser(TextToolParser):
    """``[TOOL_CALLS]`` with a list of calls, or ``[TOOL_CALLS]name[ARGS]{...}`` for each: Mistral's instruct models."""

    starts = ("[TOOL_CALLS]",)

    def opening(self, names: Sequence[str]) -> str:
        """See :meth:`ToolParser.opening`. Models that know the token ``[ARGS]`` write the second form."""
        if "[ARGS]" in self.tokenizer.get_vocab():
            return "[TOOL_CALLS]" + (f"{names[0]}[ARGS]" if len(names) == 1 else "")
        return "[TOOL_CALLS][" + _opened(names, "arguments")

    def read(self, text: str, tools: Mapping[str, Properties]) -> Reading:
        """See :meth:`TextToolParser.read`."""
        marker = text.find("[TOOL_CALLS]")
        if marker < 0:
            return text, [], []
        if text[skip_blanks(text, marker + len("[TOOL_CALLS]")) :].startswith(("[", "{")):
            return self._read_list(text, marker)
        return read_calls(text, "[TOOL_CALLS]", "[TOOL_CALLS]", self._read_one)

    @staticmethod
    def _read_list(text: str, marker: int) -> Reading:
        try:
            value, position = read_json(text, marker + len("[TOOL_CALLS]"))
            if not value:
                raise NoCallError("the list of calls is empty")
        except NoCallError as error:
            return text, [], [MalformedCall(text[marker:], str(error))]
        calls: list[FunctionCall] = []
        malformed: list[MalformedCall] = []
        for element in value if isinstance(value, list) else [value]:
            try:
                calls.append(call_of_object(element, "arguments"))
            except NoCallError as error:
                malformed.append(MalformedCall(json.dumps(element, ensure_ascii=False), str(error)))
        pieces = [text[:marker], *(call.text for call in malformed), text[position:]]
        return "".join(pieces) if calls else text, calls, malformed[:MAX_MALFORMED]

    @staticmethod
    def _read_one(text: str, position: int) -> tuple[FunctionCall, int]:
        arguments, following = text.find("[ARGS]", position), text.find("[TOOL_CALLS]", position)
        if arguments < 0 or 0 <= following < arguments:
            raise NoCallError("no [ARGS] follows the name of the function")
        name = text[position:arguments].partition("[CALL_ID]")[0]
        value, end = read_json(text, arguments + len("[ARGS]"))
        return make_call(name, value), end


def _opened(names: Sequence[str], arguments_key: str) -> str:
    """The beginning of the JSON object of a call, up to the arguments if there is one name."""
    if len(names) > 1:
        return '{"name": "'
    return f'{{"name": {json.dumps(names[0], ensure_ascii=False)}, "{arguments_key}":'
