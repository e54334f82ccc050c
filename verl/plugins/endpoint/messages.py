"""Anthropic's ``/v1/messages``."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from anthropic.types import Message as Reply
from pydantic import BaseModel, Field, StrictInt

from verl.base.types import JsonObject
from verl.datasets.chat import Message
from verl.errors import DataError
from verl.plugins.endpoint.calls import CallRefusedError, ModelAnswer, ModelCall
from verl.plugins.endpoint.chat import NO_PARAMETERS, Event
from verl.plugins.endpoint.requests import (
    CallBody,
    checked_messages,
    image_part,
    joined_parts,
    read_body,
    tools_to_call,
)
from verl.vision.data_urls import data_url

THOUGHTS = ("thinking", "redacted_thinking")
"""Parts of earlier answers that clients send back; the policy is not shown them."""


class MessagesTool(BaseModel):
    """Description of a tool."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: JsonObject | None = None

    def described(self) -> JsonObject:
        """Return the description in the form that chat templates read."""
        described = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": described | {"parameters": self.input_schema or dict(NO_PARAMETERS)}}


class ToolChoice(BaseModel):
    """True if tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesBody(CallBody):
    """Body of a request."""

    messages: list[JsonObject] = Field(min_length=1)
    system: str | list[JsonObject] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    max_tokens: StrictInt = Field(ge=1)
    stop_sequences: list[str] | None = None

    def call(self) -> ModelCall:
        """The call in no vendor's form."""
        system = [{"role": "system", "content": text}] if (text := _text_of(self.system, "system")) else []
        turns = [turn for index, message in enumerate(self.messages) for turn in _turns(message, index)]
        choice, names = self.tool_choice or ToolChoice(type="auto"), [tool.name for tool in self.tools or ()]
        forced = {"any": None, "tool": choice.name or ""}
        return ModelCall(
            model=self.model,
            messages=checked_messages([*system, *turns], "messages"),
            tools=[tool.described() for tool in self.tools or ()] or None,
            calls_tools=choice.type != "none",
            must_call=tools_to_call(names, forced[choice.type]) if choice.type in forced else (),
            one_call=choice.disable_parallel_tool_use,
            max_tokens=self.max_tokens,
            stop=tuple(filter(None, self.stop_sequences or ())),
            sampling=self.sampling,
            unmet=self.unmet(),
        )


def _turns(message: Mapping[str, object], index: int) -> list[Message]:
    """The messages that one of Anthropic's stands for: results of tools have messages of their own."""
    where, role, content = f"messages[{index}]", message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise CallRefusedError(f"{where}.role is {role!r:.100}. Expected user or assistant.", param="messages")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise CallRefusedError(f"{where}.content is {content!r:.100}. Expected a text or blocks.", param="messages")
    parts: list[JsonObject] = []
    calls: list[JsonObject] = []
    results: list[Message] = []
    for block in blocks:
        kind = block.get("type")
        _check_order(kind, parts, calls, where)
        if kind == "text" or (kind == "image" and role == "user"):
            parts.append(_part(block, where))
        elif kind == "tool_use" and role == "assistant":
            arguments = block.get("input")
            if not isinstance(arguments, Mapping):
                raise CallRefusedError(
                    f"{where} has a tool_use with the input {arguments!r:.100}. Expected an object.", param="messages"
                )
            function = {"name": block.get("name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result_content = _content_of(block.get("content"), where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result_content})
        elif kind not in THOUGHTS or role != "assistant":
            expected = "text, image or tool_result" if role == "user" else "text or tool_use"
            raise CallRefusedError(
                f"{where} of the role {role} has a block {kind!r:.100}. Expected {expected}.", param="messages"
            )
    content = joined_parts(parts)
    if role == "assistant":
        return [{"role": role, "content": content, "tool_calls": calls}]
    return [*results, *([{"role": role, "content": content}] if parts or not results else [])]


def _check_order(kind: object, parts: Sequence[object], calls: Sequence[object], where: str) -> None:
    """Refuse blocks in an order in which no chat template writes them."""
    for is_misplaced, first, then in (
        (kind == "tool_result" and parts, "tool_result", "text and images"),
        (kind == "text" and calls, "text", "tool_use"),
    ):
        if is_misplaced:
            raise CallRefusedError(f"{where}: blocks of the type {first} stand before {then}.", param="messages")


def _content_of(content: object, where: str) -> str | list[Mapping[str, object]]:
    """The content of a result: a text, or parts if it has images."""
    blocks = content if isinstance(content, list) else [content]
    if not any(isinstance(block, Mapping) and block.get("type") == "image" for block in blocks):
        return _text_of(content, where)
    return joined_parts([_part(block, where) for block in blocks])


def _part(block: object, where: str) -> JsonObject:
    """The part of ``chat/completions`` for a text block or an image block."""
    if not isinstance(block, Mapping) or block.get("type") != "image":
        return {"type": "text", "text": _text_of([block], where)}
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        raise CallRefusedError(
            f"{where} has an image with the source {source!r:.100}. Expected {{'type': 'base64', 'media_type': "
            "'image/png', 'data': ...}: the endpoint opens no addresses and no files.",
            param="messages",
        )
    try:
        return image_part(data_url(source.get("media_type"), source.get("data"), where))
    except DataError as error:
        raise CallRefusedError(str(error), param="messages") from error


def _text_of(content: Any, where: str) -> str:
    """The text of a text or of text blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        if not (isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str)):
            raise CallRefusedError(f"{where} has {block!r:.100}. Expected text blocks.", param=where.partition("[")[0])
    return "".join(block["text"] for block in blocks)


class MessagesReply:
    """An answer in the form of ``messages``; see :class:`verl.plugins.endpoint.stream.ReplyWriter`.

    Args:
        body: what was asked.
    """

    def __init__(self, body: MessagesBody) -> None:
        self._body = body
        self._id = f"msg_{secrets.token_hex(12)}"
        self._has_text = False
        """True if the block of the text has begun."""

    def whole(self, answers: Sequence[ModelAnswer]) -> Reply:
        """Return the answer that is not streamed."""
        [answer] = answers
        texts = [{"type": "text", "text": answer.content}] if answer.content or not answer.calls else []
        sampled = len(answer.token_ids)
        return Reply.model_validate(
            self._message([*texts, *_calls(answer)], *_end(answer), answer.prompt_tokens, sampled)
        )

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield the event before the first text."""
        yield _event({"type": "message_start", "message": self._message([], None, None, prompt_tokens, 0)})

    def text(self, index: int, new: str) -> Iterator[Event]:
        """Yield the events of a piece of text."""
        if not self._has_text:
            self._has_text = True
            empty = {"type": "text", "text": ""}
            yield _event({"type": "content_block_start", "index": 0, "content_block": empty})
        delta = {"type": "text_delta", "text": new}
        yield _event({"type": "content_block_delta", "index": 0, "delta": delta})

    def end(self, answers: Sequence[ModelAnswer]) -> Iterator[Event]:
        """Yield the events of what was not streamed, and the end."""
        [answer] = answers
        if answer.unsent or not (self._has_text or answer.calls):
            yield from self.text(0, answer.unsent)
        if self._has_text:
            yield _event({"type": "content_block_stop", "index": 0})
        for index, block in enumerate(_calls(answer), int(self._has_text)):
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            yield _event({"type": "content_block_start", "index": index, "content_block": block | {"input": {}}})
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        reason, text = _end(answer)
        delta = {"stop_reason": reason, "stop_sequence": text}
        yield _event({"type": "message_delta", "delta": delta, "usage": {"output_tokens": len(answer.token_ids)}})
        yield _event({"type": "message_stop"})

    def _message(
        self, blocks: Sequence[Mapping[str, object]], reason: str | None, stop: str | None, prompt: int, sampled: int
    ) -> JsonObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": list(blocks),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": {"input_tokens": prompt, "output_tokens": sampled},
        }


def _event(data: JsonObject) -> Event:
    return data["type"], data


def _calls(answer: ModelAnswer) -> list[JsonObject]:
    return [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in answer.calls
    ]


def _end(answer: ModelAnswer) -> tuple[str, str | None]:
    if answer.calls:
        return "tool_use", None
    if answer.stop_text is not None:
        return "stop_sequence", answer.stop_text
    return ("max_tokens" if answer.finish == "length" else "end_turn"), None


def read(body: Mapping[str, object]) -> MessagesBody:
    """Check the body of a request.

    Raises:
        CallRefusedError: it cannot be used.
    """
    return read_body(MessagesBody, body)
