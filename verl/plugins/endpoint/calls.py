"""A call of a model and its answer, in no vendor's form."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from verl.base.types import JsonObject
from verl.datasets.chat import Message
from verl.errors import VerlError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT_LENGTH = "context_length_exceeded"
"""The error code by which clients of OpenAI recognise a full context."""


class CallRefusedError(VerlError):
    """A call that is not answered.

    Args:
        message: what is wrong, and what to do.
        status: of HTTP.
        param: name of the parameter that is wrong.
        code: a word for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class ContextLengthError(CallRefusedError):
    """A call whose context leaves no room for an answer.

    Args:
        tokens: of the context.
        most: tokens of context and answer together.
    """

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
            "tokens. Please reduce the length of the messages.",
            param="messages",
            code=CONTEXT_LENGTH,
        )
        self.tokens = tokens
        self.most = most


@dataclass(frozen=True)
class ModelToolCall:
    """A tool call of the model; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """A request of a client, in terms that all vendors share."""

    model: str
    messages: list[Message] = field(default_factory=list)
    """As an OpenAI client sends them to ``chat/completions``, with texts for contents, or text parts and image parts,
    ``{"type": "image", "image": "data:..."}``; empty if there is a prompt."""
    param: str = "messages"
    """The vendor's name of the parameter with the messages, for errors."""
    prompt: str | list[int] | None = None
    """Text or tokens to continue, in place of messages."""
    tools: list[JsonObject] | None = None
    """Descriptions of the tools, as ``chat/completions`` takes them."""
    calls_tools: bool = True
    """False: tool calls are not looked for in the answer."""
    must_call: tuple[str, ...] = ()
    """The answer must call one of these tools; empty: it may call any or none."""
    one_call: bool = False
    """The answer ends with its first tool call."""
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end an answer, and are no part of it."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """``temperature``, ``top_p``, ``top_k``, ``min_p``, as far as the client named them."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further parameters, as they were sent."""
    unmet: Mapping[str, str] = field(default_factory=dict)
    """Parameters that ask for something that the endpoint does not do, and why not."""


@dataclass(frozen=True, kw_only=True)
class ModelAnswer:
    """One answer to a call."""

    content: str
    """Text without thoughts, calls and stop text; begins with what was streamed."""
    streamed: str = ""
    """The beginning of the content that the client has already."""
    calls: tuple[ModelToolCall, ...] = ()
    finish: Literal["stop", "length"]
    """``length``: the answer reached its most tokens."""
    stop_text: str | None = None
    """The stop text that ended the answer, if one did."""
    prompt_tokens: int
    token_ids: Sequence[int]
    """Sampled tokens."""
    log_probs: Sequence[float]
    """One for each drawn token."""

    @property
    def unsent(self) -> str:
        """The content that was not streamed."""
        return self.content[len(self.streamed) :]


class AnswerStream(Protocol):
    """Takes texts of answers while these are drawn, in the event loop of the call."""

    def begin(self, prompt_tokens: int) -> None:
        """Take the number of tokens before the answers; called once, before any text."""
        ...

    def text(self, index: int, new: str) -> None:
        """Take the next piece of the content of an answer."""
        ...


class ModelBackend(Protocol):
    """Interface of the object that answers the calls of one client."""

    @property
    def models(self) -> Sequence[str]:
        """Names of the models, for ``/v1/models``."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, which gives the texts of tokens."""
        ...

    @property
    def responses(self) -> dict[str, list[Message]] | None:
        """The conversation that ended with each answer to ``/v1/responses``, by its id; None: they are not kept."""
        ...

    async def answer(self, call: ModelCall, stream: AnswerStream | None = None) -> list[ModelAnswer]:
        """Draw ``call.n`` answers. Cancelling it withdraws the call.

        Args:
            call: what is asked.
            stream: gets texts before the answers are whole, as far as the engine tells them.

        Raises:
            CallRefusedError: the call is not answered.
        """
        ...


def refuse_unmet(call: ModelCall, ignored: Collection[str], remedy: str) -> None:
    """Refuse a call with a parameter that the endpoint does not keep.

    Args:
        call: the call.
        ignored: names of parameters that are disregarded.
        remedy: a sentence that says what to do.

    Raises:
        CallRefusedError: it names the parameter.
    """
    for name, reason in call.unmet.items():
        if name not in ignored:
            raise CallRefusedError(f"{name}: {reason} {remedy}", param=name, code="unsupported_parameter")
