"""OpenAI's ``/v1/chat/completions``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from openai.types import CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionTokenLogprob,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import Function
from pydantic import BaseModel, Field, StrictBool, StrictInt

from verl.base.types import JsonObject
from verl.plugins.endpoint.calls import ModelAnswer, ModelCall
from verl.plugins.endpoint.requests import (
    CallBody,
    checked_messages,
    forced_by,
    read_body,
    unmet_choice,
    unmet_detail,
    unmet_names,
)
from verl.vision.messages import without_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Event = tuple[str | None, BaseModel | Mapping[str, object]]
"""An event of a stream: its name, if it has one, and its data."""


class ToolFunction(BaseModel):
    """Description of a function."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None


class ChatTool(BaseModel):
    """Description of a tool."""

    type: Literal["function"]
    function: ToolFunction

    def described(self) -> JsonObject:
        """Return the description in the form that chat templates read."""
        function = self.function
        described = {"name": function.name, "description": function.description or ""}
        return {"type": "function", "function": described | {"parameters": function.parameters or NO_PARAMETERS}}


NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}
"""JSON schema of a function that takes no arguments; chat templates read it where a client leaves the schema out."""


class ChatBody(CallBody):
    """Body of a request."""

    messages: list[object] = Field(min_length=1)
    tools: list[ChatTool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: StrictBool | None = None
    n: StrictInt | None = Field(None, ge=1, le=128)
    max_tokens: StrictInt | None = Field(None, ge=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    logprobs: StrictBool | None = None
    stream_options: JsonObject | None = None

    def unmet(self) -> dict[str, str]:
        """See :meth:`CallBody.unmet`."""
        unmet = super().unmet() | unmet_choice(self.tool_choice)
        unmet |= unmet_detail(_details(self.messages)) | unmet_names(self.messages)
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            unmet["max_tokens"] = f"{self.max_tokens} is not max_completion_tokens={self.max_completion_tokens}."
        return unmet

    def call(self) -> ModelCall:
        """The call in no vendor's form."""
        return ModelCall(
            model=self.model,
            messages=checked_messages(self.messages, "messages"),
            tools=[tool.described() for tool in self.tools or ()] or None,
            calls_tools=self.tool_choice != "none",
            must_call=forced_by(self.tool_choice, [tool.function.name for tool in self.tools or ()]),
            one_call=self.parallel_tool_calls is False,
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=stop_texts(self.stop),
            sampling=self.sampling,
            extra=self.model_extra or {},
            unmet=self.unmet(),
        )


def _details(messages: Sequence[object]) -> Iterator[object]:
    """Yield the ``detail`` that image parts request."""
    for message in messages:
        for part in without_images([dict(message)])[1] if isinstance(message, Mapping) else ():
            image_url = part.get("image_url") if isinstance(part, Mapping) else None
            yield image_url.get("detail") if isinstance(image_url, Mapping) else None


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Texts that end an answer, without empty ones."""
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop or ()))


class ChatReply:
    """Answers in the form of ``chat/completions``; see :class:`verl.plugins.endpoint.stream.ReplyWriter`.

    Args:
        body: what was asked.
        tokenizer: gives the texts of tokens.
    """

    def __init__(self, body: ChatBody, tokenizer: PreTrainedTokenizerBase) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    def whole(self, answers: Sequence[ModelAnswer]) -> ChatCompletion:
        """Return the answer that is not streamed."""
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._body.model,
            choices=[
                Choice(
                    index=index,
                    finish_reason=_finish(answer),
                    message=_message(answer),
                    logprobs=ChoiceLogprobs(content=self._log_probs(answer)) if self._body.logprobs else None,
                )
                for index, answer in enumerate(answers)
            ],
            usage=usage(answers),
        )

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield the chunks before the first text."""
        for index in range(self._body.n or 1):
            yield None, self._piece(index, ChoiceDelta(role="assistant", content=""))

    def text(self, index: int, new: str) -> Iterator[Event]:
        """Yield the chunk of a piece of text."""
        yield None, self._piece(index, ChoiceDelta(content=new))

    def end(self, answers: Sequence[ModelAnswer]) -> Iterator[Event]:
        """Yield the chunks of what was not streamed; log-probs come together."""
        for chunk in self._last_chunks(answers):
            yield None, chunk

    def _last_chunks(self, answers: Sequence[ModelAnswer]) -> Iterator[ChatCompletionChunk]:
        for index, answer in enumerate(answers):
            log_probs = ChunkLogprobs(content=self._log_probs(answer)) if self._body.logprobs else None
            if answer.unsent or log_probs:
                yield self._piece(index, ChoiceDelta(content=answer.unsent), log_probs)
            for call_index, call in enumerate(answer.calls):
                yield self._call_piece(
                    index, call_index, ChoiceDeltaToolCallFunction(name=call.name, arguments=""), call.id
                )
                yield self._call_piece(index, call_index, ChoiceDeltaToolCallFunction(arguments=call.arguments))
            yield self._piece(index, ChoiceDelta(), finish=_finish(answer))
        if asks_usage(self._body.stream_options):
            yield self._chunk([]).model_copy(update={"usage": usage(answers)})

    def _piece(
        self, index: int, delta: ChoiceDelta, log_probs: ChunkLogprobs | None = None, finish: Any = None
    ) -> ChatCompletionChunk:
        return self._chunk([ChunkChoice(index=index, delta=delta, logprobs=log_probs, finish_reason=finish)])

    def _call_piece(
        self, index: int, call_index: int, function: ChoiceDeltaToolCallFunction, id: str | None = None
    ) -> ChatCompletionChunk:
        call = ChoiceDeltaToolCall(index=call_index, function=function)
        if id is not None:
            call = ChoiceDeltaToolCall(index=call_index, id=id, type="function", function=function)
        return self._piece(index, ChoiceDelta(tool_calls=[call]))

    def _chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._body.model,
            choices=choices,
        )

    def _log_probs(self, answer: ModelAnswer) -> list[ChatCompletionTokenLogprob]:
        return [
            ChatCompletionTokenLogprob(token=text, bytes=list(text.encode()), logprob=log_prob, top_logprobs=[])
            for text, log_prob in zip(token_texts(answer, self._tokenizer), answer.log_probs, strict=True)
        ]


def _message(answer: ModelAnswer) -> ChatCompletionMessage:
    calls = [
        ChatCompletionMessageFunctionToolCall(
            id=call.id, type="function", function=Function(name=call.name, arguments=call.arguments)
        )
        for call in answer.calls
    ]
    if not calls:
        return ChatCompletionMessage(role="assistant", content=answer.content)
    return ChatCompletionMessage(role="assistant", content=answer.content or None, tool_calls=list(calls))


def _finish(answer: ModelAnswer) -> Literal["stop", "length", "tool_calls"]:
    return "tool_calls" if answer.calls else answer.finish


def token_texts(answer: ModelAnswer, tokenizer: Any) -> list[str]:
    """Text of each drawn token."""
    return [tokenizer.decode([token]) for token in answer.token_ids]


def asks_usage(options: Mapping[str, object] | None) -> bool:
    """Return whether ``stream_options`` ask for a last chunk with the number of tokens."""
    return bool((options or {}).get("include_usage"))


def usage(answers: Sequence[ModelAnswer]) -> CompletionUsage:
    """Count the tokens of a call."""
    prompt, sampled = answers[0].prompt_tokens, sum(len(answer.token_ids) for answer in answers)
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)


def read(body: Mapping[str, object]) -> ChatBody:
    """Check the body of a request.

    Raises:
        CallRefusedError: it cannot be used.
    """
    return read_body(ChatBody, body)
