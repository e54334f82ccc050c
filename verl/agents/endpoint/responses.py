"""OpenAI's ``/v1/responses``, as far as agent kits use it: texts and function calls, whole or as a stream."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from openai.types.responses import Response as Reply
from pydantic import BaseModel, Field, StrictInt

from verl.agents.endpoint.calls import CallRefusedError, ModelAnswer, ModelCall
from verl.agents.endpoint.chat import FORCED_CALL, NO_PARAMETERS, token_texts
from verl.agents.endpoint.requests import CallBody, checked_messages, read_body
from verl.utils.dataset.chat import Message

LOG_PROBS = "message.output_text.logprobs"
NO_EFFECT = ("reasoning.encrypted_content",)
"""Further outputs that are not there to be included."""
TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesTool(BaseModel):
    """Description of a tool."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def described(self) -> dict[str, Any]:
        """Return the description in the form that chat templates read."""
        described = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": described | {"parameters": self.parameters or dict(NO_PARAMETERS)}}


class ResponsesBody(CallBody):
    """Body of a request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    include: list[str] | None = None

    def unmet(self) -> dict[str, str]:
        """See :meth:`CallBody.unmet`."""
        unmet = super().unmet()
        if self.tool_choice not in (None, "auto", "none"):
            unmet["tool_choice"] = FORCED_CALL
        if unknown := set(self.include or ()) - {LOG_PROBS, *NO_EFFECT}:
            unmet["include"] = f"{', '.join(sorted(unknown))}: there is no such output."
        return unmet

    def call(self) -> ModelCall:
        """The call in no vendor's form."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        turns = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else _turns(self.input)
        if not turns:
            raise CallRefusedError("input: there is no message in it.", param="input")
        return ModelCall(
            model=self.model,
            messages=checked_messages([*system, *turns], "input"),
            tools=[tool.described() for tool in self.tools or ()] or None,
            calls_tools=self.tool_choice != "none",
            max_tokens=self.max_output_tokens,
            sampling=self.sampling,
            unmet=self.unmet(),
        )


def _turns(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages that items stand for. What the assistant said and called in a row is one turn."""
    turns: list[Message] = []
    for number, item in enumerate(items):
        place, kind = f"input[{number}]", item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            turns.append({"role": item.get("role"), "content": _text_of(item.get("content"), place)})
        elif kind == "function_call_output":
            said = _text_of(item.get("output"), place)
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        elif kind in ("message", "function_call"):
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": "", "tool_calls": []})
            if kind == "message":
                turns[-1]["content"] += _text_of(item.get("content"), place)
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                turns[-1]["tool_calls"].append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind != "reasoning":
            raise CallRefusedError(
                f"{place} has the type {kind!r:.100}. Expected message, function_call or function_call_output.",
                param="input",
            )
    return turns


def _text_of(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallRefusedError(f"{place} has {content!r:.100}. Expected a text or parts.", param="input")
    for part in content:
        known = isinstance(part, Mapping) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)
        if not known:
            raise CallRefusedError(f"{place} has the part {part!r:.100}. Expected texts.", param="input")
    return "".join(part["text"] for part in content)


class ResponsesReply:
    """An answer in the form of ``responses``.

    Args:
        body: what was asked.
        answer: the answer.
        tokenizer: gives the texts of tokens.
    """

    def __init__(self, body: ResponsesBody, answer: ModelAnswer, tokenizer: Any) -> None:
        self._body, self._answer, self._tokenizer = body, answer, tokenizer
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._status = "incomplete" if answer.finish == "length" and not answer.calls else "completed"

    def whole(self) -> Reply:
        """Return the answer that is not streamed."""
        return Reply.model_validate(self._response(self._status, self._items()))

    def pieces(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of a stream, by name."""
        numbers = itertools.count()
        for event in self._events():
            yield event["type"], event | {"sequence_number": next(numbers)}

    def _events(self) -> Iterator[dict[str, Any]]:
        begun = self._response("in_progress", [])
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(self._items()):
            place = {"item_id": item["id"], "output_index": index}
            is_text = item["type"] == "message"
            empty = item | {"status": "in_progress"} | ({"content": []} if is_text else {"arguments": ""})
            yield {"type": "response.output_item.added", "output_index": index, "item": empty}
            yield from self._text_events(place, item) if is_text else self._call_events(place, item)
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{self._status}", "response": self._response(self._status, self._items())}

    @staticmethod
    def _text_events(place: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        [part] = item["content"]
        place = {**place, "content_index": 0}
        text = {**place, "logprobs": part.get("logprobs") or []}
        yield {"type": "response.content_part.added", **place, "part": part | {"text": ""}}
        yield {"type": "response.output_text.delta", **text, "delta": part["text"]}
        yield {"type": "response.output_text.done", **text, "text": part["text"]}
        yield {"type": "response.content_part.done", **place, "part": part}

    @staticmethod
    def _call_events(place: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", **place, "delta": arguments}
        yield {"type": f"{kind}.done", **place, "arguments": arguments, "name": item["name"]}

    def _items(self) -> list[dict[str, Any]]:
        answer, body = self._answer, self._body
        items: list[dict[str, Any]] = []
        if answer.content or not answer.calls:
            part: dict[str, Any] = {"type": "output_text", "text": answer.content, "annotations": []}
            if LOG_PROBS in (body.include or ()):
                part["logprobs"] = [
                    {"token": text, "bytes": list(text.encode()), "logprob": log_prob, "top_logprobs": []}
                    for text, log_prob in zip(token_texts(answer, self._tokenizer), answer.log_probs, strict=True)
                ]
            message = {"type": "message", "role": "assistant", "status": self._status, "content": [part]}
            items.append(message | {"id": f"msg_{self._id}"})
        for number, call in enumerate(answer.calls):
            named = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            items.append(named | {"id": f"fc_{self._id}_{number}", "status": "completed"})
        return items

    def _response(self, status: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        answer, body = self._answer, self._body
        drawn = len(answer.token_ids)
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + drawn,
        }
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
            "parallel_tool_calls": True,
            "tool_choice": "none" if body.tool_choice == "none" else "auto",
            "tools": [{"strict": False, **tool.model_dump()} for tool in body.tools or ()],
            "usage": usage if status != "in_progress" else None,
        }


def read(body: Mapping[str, Any]) -> ResponsesBody:
    """Check the body of a request.

    Raises:
        CallRefusedError: it cannot be used.
    """
    return read_body(ResponsesBody, body)
