"""The format of gpt-oss: messages on channels, some of them addressed to a function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from verl.agents.parsers.base import (
    FunctionCall,
    MalformedCall,
    NoCallError,
    Properties,
    Reading,
    TextToolParser,
    ToolParser,
    make_call,
    read_json,
    skip_blanks,
)

MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
"""Tokens that end a message; ``start`` too, because models leave the end out at times."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|<\|return\|>|$)", re.DOTALL
)


@ToolParser.register("gpt-oss")
class GptOssToolParser(TextToolParser):
    """``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>``.

    The channel ``analysis`` is the thinking; the rest, and a commentary without an address, is the content.
    """

    def opening(self, names: Sequence[str]) -> str:
        """See :meth:`ToolParser.opening`."""
        name = f"{names[0]} <|constrain|>json<|message|>" if len(names) == 1 else ""
        return f"<|channel|>commentary to=functions.{name}"

    def split_thinking(self, text: str, is_thinking: bool) -> tuple[str, str]:
        """See :meth:`TextToolParser.split_thinking`."""
        return "\n".join(_ANALYSIS.findall(text)), _ANALYSIS.sub("", text)

    def read(self, text: str, tools: Mapping[str, Properties]) -> Reading:
        """See :meth:`TextToolParser.read`."""
        content: list[str] = []
        calls: list[FunctionCall] = []
        malformed: list[MalformedCall] = []
        position = 0
        while position < len(text):
            begin = text.find(MESSAGE, position)
            header = text[position : begin if begin >= 0 else len(text)]
            recipient = _RECIPIENT.search(header)
            if begin < 0:
                if recipient:
                    malformed.append(MalformedCall(header, f"no {MESSAGE} follows the address {recipient[1]}"))
                content.append(header)
                break
            body = begin + len(MESSAGE)
            end = _ENDS.search(text, body)
            after = end.start() if end else len(text)
            try:
                if recipient:
                    call, after = _read_call(recipient[1], text, body)
                    calls.append(call)
                else:
                    content.append(text[body:after])
            except NoCallError as error:
                malformed.append(MalformedCall(text[position:after], str(error)))
                content.append(text[position:after])
            end = _ENDS.match(text, after)
            position = end.end() if end else after
        return "".join(content), calls, malformed


def _read_call(recipient: str, text: str, position: int) -> tuple[FunctionCall, int]:
    if not recipient.startswith("functions."):
        raise NoCallError(f"the address {recipient!r} is no function: write to=functions.name")
    value, position = read_json(text, position)
    end = skip_blanks(text, position)
    if end < len(text) and not _ENDS.match(text, end):
        raise NoCallError(f"{text[end : end + 20]!r} follows the JSON object of the arguments")
    return make_call(recipient.removeprefix("functions."), value), end
