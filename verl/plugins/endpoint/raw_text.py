"""Tokens of a raw prompt and its continuations, written once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

from verl.agents.conversation import TokenSequence, Turn
from verl.datasets.chat import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RawText:
    """A raw prompt with what the policy drew after it; it grows like a :class:`~verl.agents.conversation.Conversation`.

    Args:
        tokenizer: of the policy.
        prompt: a text, whose control tokens are taken for tokens, or tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: str | list[int]) -> None:
        self._tokenizer = tokenizer
        self._sequence = TokenSequence(self._encoded(prompt))
        self.messages: list[Message] = [{"role": "user"}]

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the first prompt."""
        return self._sequence.prompt_ids

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the first prompt."""
        return self._sequence.response_ids

    @property
    def response_mask(self) -> list[int]:
        """1 for tokens that the policy drew."""
        return self._sequence.response_mask

    @property
    def turns(self) -> list[Turn]:
        """The parts of the response."""
        return self._sequence.turns

    @property
    def ids(self) -> list[int]:
        """The first prompt and all tokens after it."""
        return self._sequence.ids

    def beginnings(self, prompt: str | list[int]) -> Iterator[int]:
        """Yield for each turn of the policy how much of a longer prompt is written up to its end; 0 if it differs."""
        for turn in self.turns:
            if turn.role == "assistant":
                ids = self.prompt_ids + self.response_ids[: turn.stop]
                written = self._tokenizer.decode(ids) if isinstance(prompt, str) else ids
                yield len(written) if len(written) < len(prompt) and prompt[: len(written)] == written else 0

    def add_text(self, text: str | list[int]) -> None:
        """Append what the program wrote."""
        ids = self._encoded(text)
        self._sequence.add("user", ids, 0, [0.0] * len(ids))
        self.messages.append({"role": "user"})

    def add_drawn(self, token_ids: Sequence[int], log_probs: Sequence[float], message: Message) -> None:
        """Append what the policy drew."""
        self._sequence.add("assistant", token_ids, 1, log_probs)
        self.messages.append(message)

    def copy(self) -> Self:
        """Return a copy that grows by itself."""
        return self._cut(len(self.turns))

    def branch(self, drawn_turns: int) -> Self:
        """Return a copy that ends with the policy's turn of this number, counted from 1."""
        parts = [index for index, turn in enumerate(self.turns, 1) if turn.role == "assistant"]
        return self._cut(parts[drawn_turns - 1])

    def check(self) -> Counter[str]:
        """No template renders raw text, so nothing differs."""
        return Counter()

    def _cut(self, parts: int) -> Self:
        sequence, stop = self._sequence, self.turns[parts - 1].stop if parts else 0
        twin = type(self)(self._tokenizer, sequence.prompt_ids)
        twin._sequence = TokenSequence(
            sequence.prompt_ids,
            sequence.response_ids[:stop],
            sequence.response_mask[:stop],
            sequence.response_logprobs[:stop],
            sequence.turns[:parts],
        )
        twin.messages = self.messages[: parts + 1]
        return twin

    def _encoded(self, text: str | list[int]) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else list(text)
