"""OpenAI's ``/v1/responses``, as far as agent kits use it: texts, images and function calls, whole or as a stream."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from openai.types.responses import Response as Reply
from pydantic import BaseModel, Field, PrivateAttr, StrictBool, StrictInt

from verl.base.types import JsonObject
from verl.datasets.chat import Message
from verl.plugins.endpoint.calls import CallRefusedError, ModelAnswer, ModelCall
from verl.plugins.endpoint.chat import NO_PARAMETERS, Event, token_texts
from verl.plugins.endpoint.requests import (
    CallBody,
    checked_messages,
    forced_by,
    image_part,
    joined_parts,
    read_body,
    unmet_choice,
    unmet_detail,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG_PROBS = "message.output_text.logprobs"
NO_EFFECT = ("reasoning.encrypted_content",)
"""Further outputs that are not there to be included."""
TEXT_PARTS = ("input_text", "output_text", "text")
IMAGE_PART = "input_image"


class ResponsesTool(BaseModel):
    """Description of a tool."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None

    def described(self) -> JsonObject:
        """Return the description in the form that chat templates read."""
        described = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": described | {"parameters": self.parameters or dict(NO_PARAMETERS)}}


class ResponsesBody(CallBody):
    """Body of a request."""

    input: str | list[JsonObject]
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: StrictBool | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    include: list[str] | None = None
    previous_response_id: str | None = None
    store: StrictBool | None = None
    _before: list[Message] = PrivateAttr(default_factory=list)
    """The conversation that ends with the previous response, without its instructions."""

    @property
    def turns(self) -> list[Message]:
        """All messages but the instructions."""
        instructions = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else _turns(self.input)
        return [*self._before, *instructions]

    def unmet(self) -> dict[str, str]:
        """See :meth:`CallBody.unmet`."""
        unmet = super().unmet() | unmet_choice(self.tool_choice)
        if unknown := set(self.include or ()) - {LOG_PROBS, *NO_EFFECT}:
            unmet["include"] = f"{', '.join(sorted(unknown))}: there is no such output."
        return unmet | unmet_detail(_details(self.input))

    def call(self) -> ModelCall:
        """The call in no vendor's form."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        turns = self.turns
        if not turns:
            raise CallRefusedError("input: there is no message in it.", param="input")
        return ModelCall(
            model=self.model,
            messages=checked_messages([*system, *turns], "input"),
            param="input",
            tools=[tool.described() for tool in self.tools or ()] or None,
            calls_tools=self.tool_choice != "none",
            must_call=forced_by(self.tool_choice, [tool.name for tool in self.tools or ()]),
            one_call=self.parallel_tool_calls is False,
            max_tokens=self.max_output_tokens,
            sampling=self.sampling,
            unmet=self.unmet(),
        )


def _turns(items: Sequence[Mapping[str, object]]) -> list[Message]:
    """Return the messages that items stand for; consecutive items of the assistant are one turn."""
    turns: list[Message] = []
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            turns.append({"role": item.get("role"), "content": _content_of(item.get("content"), where)})
        elif kind == "function_call_output":
            text = _content_of(item.get("output"), where)
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind in ("message", "function_call"):
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": "", "tool_calls": []})
            if kind == "message":
                text = _content_of(item.get("content"), where)
                if not isinstance(text, str):
                    raise CallRefusedError(f"{where} of the role assistant has an image. It has texts.", param="input")
                turns[-1]["content"] += text
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                turns[-1]["tool_calls"].append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind != "reasoning":
            raise CallRefusedError(
                f"{where} has the type {kind!r:.100}. Expected message, function_call or function_call_output.",
                param="input",
            )
    return turns


def _content_of(content: object, where: str) -> str | list[Mapping[str, object]]:
    """The content of a message: a text, or parts if it has images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallRefusedError(f"{where} has {content!r:.100}. Expected a text or parts.", param="input")
    return joined_parts([_chat_part(part, where) for part in content])


def _chat_part(part: Any, where: str) -> JsonObject:
    """The part of ``chat/completions`` for a text or an image."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind != IMAGE_PART:
        raise CallRefusedError(f"{where} has the part {part!r:.100}. Expected texts and images.", param="input")
    if not isinstance(part.get("image_url"), str) or part.get("file_id") is not None:
        raise CallRefusedError(
            f"{where} has the image {part!r:.100}. Expected {{'type': 'input_image', 'image_url': "
            "'data:image/png;base64,...'}: the endpoint opens no addresses and no files.",
            param="input",
        )
    return image_part(part["image_url"])


def _details(items: object) -> Iterator[object]:
    """Yield what images ask for as ``detail``."""
    for item in items if isinstance(items, list) else ():
        for parts in (item.get("content"), item.get("output")):
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, Mapping) and part.get("type") == IMAGE_PART:
                    yield part.get("detail")


class ResponsesReply:
    """An answer in the form of ``responses``; see :class:`verl.plugins.endpoint.stream.ReplyWriter`.

    Args:
        body: what was asked.
        tokenizer: gives the texts of tokens.
        kept: takes the conversation, under the id of the response; None: it is not kept.
    """

    def __init__(
        self, body: ResponsesBody, tokenizer: PreTrainedTokenizerBase, conversations: dict[str, list[Message]] | None
    ) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._conversations = None if body.store is False else conversations
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._numbers = itertools.count()
        self._has_text = False
        """True if the item of the text has begun."""

    def whole(self, answers: Sequence[ModelAnswer]) -> Reply:
        """Return the answer that is not streamed."""
        [answer] = answers
        has_text = bool(answer.content) or not answer.calls
        items = self._items(answer, has_text)
        self._keep(items)
        return Reply.model_validate(self._response(_status(answer), items, answer))

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield the events before the first text."""
        started = self._response("in_progress", [], None)
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)

    def text(self, index: int, new: str) -> Iterator[Event]:
        """Yield the events of a piece of text."""
        if not self._has_text:
            self._has_text = True
            empty = self._message_item("in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=empty)
            yield self._event("response.content_part.added", **self._text_place, part=_part(""))
        yield self._event("response.output_text.delta", **self._text_place, delta=new, logprobs=[])

    def end(self, answers: Sequence[ModelAnswer]) -> Iterator[Event]:
        """Yield the events of what was not streamed, and the end; log-probs come with the end of the text."""
        [answer] = answers
        if answer.unsent or not (self._has_text or answer.calls):
            yield from self.text(0, answer.unsent)
        items = self._items(answer, self._has_text)
        self._keep(items)
        for index, item in enumerate(items):
            if item["type"] == "message":
                [part] = item["content"]
                log_probs = part.get("logprobs") or []
                text = part["text"]
                yield self._event("response.output_text.done", **self._text_place, text=text, logprobs=log_probs)
                yield self._event("response.content_part.done", **self._text_place, part=part)
            else:
                where, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
                empty = item | {"status": "in_progress", "arguments": ""}
                kind = "response.function_call_arguments"
                yield self._event("response.output_item.added", output_index=index, item=empty)
                yield self._event(f"{kind}.delta", **where, delta=arguments)
                yield self._event(f"{kind}.done", **where, arguments=arguments, name=item["name"])
            yield self._event("response.output_item.done", output_index=index, item=item)
        status = _status(answer)
        yield self._event(f"response.{status}", response=self._response(status, items, answer))

    def _keep(self, items: Sequence[Mapping[str, object]]) -> None:
        if self._conversations is not None:
            self._conversations[self._id] = [*self._body.turns, *_turns(items)]

    def _event(self, kind: str, **data: object) -> Event:
        return kind, {"type": kind, **data, "sequence_number": next(self._numbers)}

    @property
    def _text_place(self) -> JsonObject:
        return {"item_id": f"msg_{self._id}", "output_index": 0, "content_index": 0}

    def _message_item(self, status: str, parts: list[JsonObject]) -> JsonObject:
        item = {"type": "message", "role": "assistant", "status": status, "content": parts}
        return item | {"id": f"msg_{self._id}"}

    def _items(self, answer: ModelAnswer, has_text: bool) -> list[JsonObject]:
        items: list[JsonObject] = []
        if has_text:
            part = _part(answer.content)
            if LOG_PROBS in (self._body.include or ()):
                part["logprobs"] = [
                    {"token": text, "bytes": list(text.encode()), "logprob": log_prob, "top_logprobs": []}
                    for text, log_prob in zip(token_texts(answer, self._tokenizer), answer.log_probs, strict=True)
                ]
            items.append(self._message_item(_status(answer), [part]))
        for index, call in enumerate(answer.calls):
            named = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            items.append(named | {"id": f"fc_{self._id}_{index}", "status": "completed"})
        return items

    def _response(self, status: str, items: Sequence[Mapping[str, object]], answer: ModelAnswer | None) -> JsonObject:
        """The response; it has no answer while it is in progress."""
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "model": body.model,
            "output": list(items),
            "previous_response_id": body.previous_response_id,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": False, **tool.model_dump()} for tool in body.tools or ()],
            "usage": None if answer is None else _usage(answer),
        }


def _status(answer: ModelAnswer) -> str:
    return "incomplete" if answer.finish == "length" and not answer.calls else "completed"


def _part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": []}


def _usage(answer: ModelAnswer) -> JsonObject:
    sampled = len(answer.token_ids)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + sampled,
    }


def read(body: Mapping[str, object], conversations: Mapping[str, list[Message]] | None) -> ResponsesBody:
    """Check the body of a request.

    Args:
        body: the body.
        conversations: by the id of the response that ended them; None: none are kept.

    Raises:
        CallRefusedError: it cannot be used.
    """
    request = read_body(ResponsesBody, body)
    previous = request.previous_response_id
    if previous is not None:
        if conversations is None or previous not in conversations:
            raise CallRefusedError(
                f"previous_response_id: there is no stored response {previous!r:.100}. Responses of the same "
                "trajectory are stored unless store=false was set. Send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        request._before = conversations[previous]
    return request
