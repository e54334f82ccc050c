"""Warn of rows that can be read and are probably mistakes: one warning for each kind, with count, places and remedy."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from verl.datasets.chat import Message
from verl.datasets.loss_mask import REWRITTEN, SWITCHES, text_leaves
from verl.datasets.template_probes import writes_field
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name", "id", *SWITCHES}
"""Fields of a message that are checked elsewhere, or name things."""
EXAMPLES = 3  # rows shown for each problem; a fault of the data set is often in all rows

KINDS: Mapping[str, tuple[str, str]] = {
    "role": (
        "have a message of a role that the chat template does not name",
        "Models know system, user, assistant and tool: rename the role, unless yours was trained with it.",
    ),
    "answered": (
        "end with the assistant's turn, so the model is asked for a second answer after that one",
        "Take the answer out of the prompt; a scorer finds it in reward_model.ground_truth.",
    ),
    "unasked": (
        "have no message of the user",
        "Put the question into a message of the role user.",
    ),
    "empty question": (
        "have a message of the user without text",
        "Give it a text, or take the row out.",
    ),
    "empty answer": (
        "have a message of the assistant without text, which trains the model to end its turn at once",
        "Give it a text, or take the row out.",
    ),
    "lost text": (
        "have a turn to train on of which the chat template leaves out a text",
        REWRITTEN,
    ),
    "field": (
        "have a message with text in a field that the chat template does not write",
        "Rename the field as the template calls it, put its text into the content, or take it out.",
    ),
    "special token": (
        "have the text of a special token inside a message, which the tokenizer takes for the token itself",
        "Take it out of the texts: the chat template writes the special tokens.",
    ),
    "special text": (
        "have the text of a special token inside a message, which stays text",
        "Leave it where the message speaks of the token; it does not act as one, as the chat template writes those.",
    ),
}
"""Description of each kind of row for the log, and the remedy."""


class ContentChecks:
    """Collects questionable rows of a data set.

    Args:
        tokenizer: names roles in its chat template, and has special tokens.
        rows: what the rows are, for the warnings: ``prompts``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: str) -> None:
        self.rows = rows
        self._tokenizer = tokenizer
        self._template = str(tokenizer.chat_template)
        self._written: dict[tuple[str, str], bool] = {}
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special = sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._count = 0
        self._examples: dict[str, list[tuple[str, str]]] = {}
        self._reported: set[str] = set()

    def prompt(self, messages: Sequence[Message], where: str) -> None:
        """Look at the messages that a model is to answer; ``place`` is file and row."""
        self._count += 1
        roles = [message["role"] for message in messages]
        if roles[-1] == "assistant":
            self.add("answered", where)
        self._messages(messages, where, "special text")

    def conversation(self, messages: Sequence[Message], where: str) -> None:
        """Look at a conversation with its answers."""
        self._count += 1
        if any(_is_empty(message) for message in messages if message["role"] == "assistant"):
            self.add("empty answer", where)
        self._messages(messages, where, "special token")

    def add(self, kind: str, where: str, example: str = "") -> None:
        """Note a row of one of ``KINDS``."""
        self._examples.setdefault(kind, []).append((where, example))

    def report(self) -> None:
        """Warn of each kind that was found and not reported before."""
        for kind in [kind for kind in self._examples if kind not in self._reported]:
            self._reported.add(kind)
            logger.warning("%s", self._described(kind))

    def refuse(self, kind: str) -> None:
        """Raise DataError if rows of one of ``KINDS`` were found."""
        if kind in self._examples:
            raise DataError(self._described(kind))

    def _described(self, kind: str) -> str:
        (what, remedy), finds = KINDS[kind], self._examples[kind]
        shown = [where + (f" ({example})" if example else "") for where, example in finds[:EXAMPLES]]
        more = ", ..." if len(finds) > EXAMPLES else ""
        return f"{len(finds)} of {self._count} {self.rows} {what}: {'; '.join(shown)}{more}. {remedy}"

    def _messages(self, messages: Sequence[Message], where: str, special: str) -> None:
        roles = {message["role"]: None for message in messages}
        if "user" not in roles:
            self.add("unasked", where)
        unknown = next((role for role in roles if role not in ROLES and role not in self._template), None)
        if unknown is not None:
            self.add("role", where, unknown)
        if any(_is_empty(message) for message in messages if message["role"] == "user"):
            self.add("empty question", where)
        unwritten = (
            field
            for message in messages
            for field in message.keys() - FIELDS
            if any(text.strip() for text in text_leaves(message[field])) and not self._writes(message["role"], field)
        )
        if field := min(unwritten, default=""):
            self.add("field", where, field)
        for message in messages:
            if message["content"] and (match := self._special.search(message["content"])):
                self.add("special token" if message["role"] == "assistant" else special, where, match[0])
                break

    def _writes(self, role: str, field: str) -> bool:
        if (role, field) not in self._written:
            self._written[role, field] = writes_field(self._tokenizer, role, field)
        return self._written[role, field]


def _is_empty(message: Message) -> bool:
    return not (message["content"] or "").strip() and not message.get("tool_calls")
