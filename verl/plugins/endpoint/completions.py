"""OpenAI's ``/v1/completions``: raw prompts, with the control tokens that the program writes in them."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs
from pydantic import Field, StrictInt

from verl.base.types import JsonObject
from verl.plugins.endpoint.calls import CallRefusedError, ModelAnswer, ModelCall
from verl.plugins.endpoint.chat import Event, asks_usage, stop_texts, token_texts, usage
from verl.plugins.endpoint.requests import CallBody, read_body

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MAX_TOKENS = 16
"""As OpenAI has it."""
OTHER_TOKENS = "log-probs are there of the drawn tokens alone; ask for 0."
"""Why ``logprobs`` is 0 at most: engines return the log-probability of the drawn token, and of no other."""


class CompletionBody(CallBody):
    """Body of a request."""

    prompt: str | list[StrictInt]
    n: StrictInt | None = Field(None, ge=1, le=128)
    max_tokens: StrictInt | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    logprobs: StrictInt | None = Field(None, ge=0)
    stream_options: JsonObject | None = None

    def unmet(self) -> dict[str, str]:
        """See :meth:`CallBody.unmet`."""
        return super().unmet() | ({"logprobs": OTHER_TOKENS} if self.logprobs else {})

    def call(self) -> ModelCall:
        """The call in no vendor's form."""
        return ModelCall(
            model=self.model,
            prompt=self.prompt,
            n=self.n or 1,
            max_tokens=self.max_tokens or DEFAULT_MAX_TOKENS,
            stop=stop_texts(self.stop),
            sampling=self.sampling,
            unmet=self.unmet(),
        )


class CompletionReply:
    """Answers in the form of ``completions``; see :class:`verl.plugins.endpoint.stream.ReplyWriter`.

    Args:
        body: what was asked.
        tokenizer: gives the texts of tokens.
    """

    def __init__(self, body: CompletionBody, tokenizer: PreTrainedTokenizerBase) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())

    def whole(self, answers: Sequence[ModelAnswer]) -> Completion:
        """Return the answer that is not streamed."""
        choices = [self._choice(index, answer, answer.content) for index, answer in enumerate(answers)]
        return self._piece(choices).model_copy(update={"usage": usage(answers)})

    def begin(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield nothing: the first text begins the stream."""
        yield from ()

    def text(self, index: int, new: str) -> Iterator[Event]:
        """Yield the chunk of a piece of text."""
        # The type of a choice has no room for one that is not finished, though the API sends such.
        choice = {"index": index, "text": new, "finish_reason": None, "logprobs": None}
        yield None, self._piece([]).model_dump(exclude_unset=True) | {"choices": [choice]}

    def end(self, answers: Sequence[ModelAnswer]) -> Iterator[Event]:
        """Yield a chunk for each choice, with what was not streamed; log-probs come together."""
        for index, answer in enumerate(answers):
            yield None, self._piece([self._choice(index, answer, answer.unsent)])
        if asks_usage(self._body.stream_options):
            yield None, self._piece([]).model_copy(update={"usage": usage(answers)})

    def _choice(self, index: int, answer: ModelAnswer, text: str) -> CompletionChoice:
        log_probs = self._log_probs(answer) if self._body.logprobs is not None else None
        return CompletionChoice(index=index, finish_reason=answer.finish, text=text, logprobs=log_probs)

    def _piece(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._id, object="text_completion", created=self._created, model=self._body.model, choices=choices
        )

    def _log_probs(self, answer: ModelAnswer) -> Logprobs:
        texts = token_texts(answer, self._tokenizer)
        offsets = itertools.accumulate((len(text) for text in texts[:-1]), initial=0)
        return Logprobs(tokens=texts, token_logprobs=list(answer.log_probs), text_offset=list(offsets))


def read(body: Mapping[str, object], vocabulary: int) -> CompletionBody:
    """Check the body of a request.

    Args:
        body: as it was sent.
        vocabulary: number of tokens of the tokenizer.

    Raises:
        CallRefusedError: it cannot be used.
    """
    read = read_body(CompletionBody, body)
    for token in () if isinstance(read.prompt, str) else read.prompt:
        if not 0 <= token < vocabulary:
            message = f"prompt: {token} is no token. The tokenizer has the ids 0 to {vocabulary - 1}."
            raise CallRefusedError(message, param="prompt", code="invalid_value")
    return read
