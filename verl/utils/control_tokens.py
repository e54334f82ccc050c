r"""Tokens of a rendered conversation, in which the texts of messages never become control tokens.

A chat template writes control tokens by their text (``<|im_end|>``), and a message may hold the same text: a web page
about chat templates, or an attack. :meth:`ControlTokens.guard` marks such texts before the template renders them;
:meth:`ControlTokens.encode` then takes the unmarked ones for tokens and the marked ones for text.

Both use Unicode noncharacters, which no text may contain: in texts that do, they become U+FFFD.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer

from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Side = Literal["left", "middle", "right"]
Author = Literal["program", "prompt", "policy"]

MARK = "\ufdd1"
"""A character that no guarded text holds: where it is found in a rendered text, the caller put it."""

_BROKEN, _OPEN, _CLOSE = "\ufdd0", "\ufdd2", "\ufdd3"
_NOTHING = re.compile("(?!)")
_UNUSABLE = re.compile(f"[{_BROKEN}{MARK}{_OPEN}{_CLOSE}\ud800-\udfff]")
_SHORT, _KEPT_SHORT = 32, 4096
"""Characters of texts whose guarded form is kept, and how many of them."""
_NOTICES: Mapping[Side, str] = {
    "left": "...(truncated)",
    "middle": "...(truncated)...",
    "right": "(truncated)...",
}


class ControlTokens:
    """Encodes rendered conversations with a tokenizer's vocabulary; holds no state, so threads may share it.

    Control tokens are those that the tokenizer calls special, and the added tokens in the text of the chat template
    (``<tool_call>``, ``</think>``) with those that open or close the same. Other added tokens are words like any other.

    Args:
        tokenizer: a fast tokenizer. It is copied, later changes to it have no effect.
        template: text of the chat template.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"the tokenizer of '{tokenizer.name_or_path}' ({type(tokenizer).__name__}) is not one of the "
                "'tokenizers' library (it has no tokenizer.json). Conversations need that library to keep the texts "
                "of tool results apart from control tokens. Convert it, or use a model that ships tokenizer.json."
            )
        added: dict[int, AddedToken] = tokenizer.added_tokens_decoder
        # A single character is a letter, whatever the tokenizer says.
        self.special = {token.content: n for n, token in added.items() if token.special and len(token.content) > 1}
        """Tokens that the tokenizer calls special: they open and close turns."""
        contents = [token.content for token in added.values() if len(token.content.strip()) > 1]
        written = {_opening(content) for content in contents if content in template}
        structural = {content for content in contents if _opening(content) in written}
        self._special = _any_of(self.special)
        self._control = _any_of(structural | self.special.keys())
        self._added = _any_of([token.content for token in added.values()])
        self._private = {token.content: f"{_OPEN}{token_id}{_CLOSE}" for token_id, token in added.items()}
        self._core = _without_added_tokens(tokenizer, self._private, structural | self.special.keys())
        renamed = [
            AddedToken(
                self._private[token.content],
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=True,
            )
            for token in added.values()
        ]
        self._core.add_tokens([*renamed, AddedToken(_OPEN + _CLOSE, special=True, normalized=False)])
        self._real = {
            self._core.token_to_id(self._private[token.content]): token_id for token_id, token in added.items()
        }
        self._longest = max(map(len, self._core.get_vocab()))
        # Roles, names of keys and of tools come again in every message.
        self._guarded_short = lru_cache(_KEPT_SHORT)(self._guarded)

    def guard(self, value: Any, author: Author) -> Any:
        """Mark control tokens in a text, or in all texts of a JSON value.

        In what a ``program`` gave (results of tools, messages of simulated users), all control tokens. In a ``prompt``
        those that the tokenizer calls special: prompts speak of ``<think>`` and mean the token. In texts of the
        ``policy`` none, as its thoughts and calls hold such tokens.
        """
        kind = type(value)
        if kind is str:
            return self._guarded_short(value, author) if len(value) <= _SHORT else self._guarded(value, author)
        # Exact types first: asking an abstract class takes longer than all the rest.
        if kind in (int, float, bool, NoneType):
            return value
        if kind is dict or isinstance(value, Mapping):
            return {self.guard(key, author): self.guard(item, author) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard(item, author) for item in value]
        return self._guarded(value, author) if isinstance(value, str) else value

    def _guarded(self, text: str, author: Author) -> str:
        text = cleaned(text)
        if author == "policy":
            return text
        pattern = self._control if author == "program" else self._special
        return pattern.sub(lambda match: "".join(c + _BROKEN for c in match[0]), text)

    def guard_prompt(self, message: Any, assistant: Author = "policy") -> Any:
        """Mark control tokens in a message of a prompt: in results of tools as a program's, in turns of the assistant
        as those of ``assistant``.
        """
        authors: dict[object, Author] = {"assistant": assistant, "tool": "program"}
        return self.guard(message, authors.get(message.get("role"), "prompt"))

    def plain(self, guarded: str) -> str:
        """A guarded text without its marks."""
        return plain(guarded)

    def encode(self, rendered: str, after_token: bool = False) -> list[int]:
        """Tokenize a rendered text without adding special tokens.

        With ``after_token`` as it would be after a control token: no character of it can merge with what stands before
        it, and it gets no space in front from tokenizers that put one at the beginning of a text.
        """
        text = self._added.sub(lambda match: self._private[match[0]], rendered).replace(_BROKEN, "")
        ids = self._core.encode((_OPEN + _CLOSE if after_token else "") + text, add_special_tokens=False).ids
        return [self._real.get(token_id, token_id) for token_id in (ids[1:] if after_token else ids)]

    def last_special(self, text: str) -> str:
        """The special token with which a text ends, or an empty string."""
        return max((token for token in self.special if text.endswith(token)), key=len, default="")

    def next_special(self, text: str, start: int) -> re.Match[str] | None:
        """The first special token of a text that ends after position ``start``."""
        return next((match for match in self._special.finditer(text) if match.end() > start), None)

    def split(self, text: str) -> list[str]:
        """The special tokens of a text and what stands between them, in order."""
        edges = [edge for match in self._special.finditer(text) for edge in match.span()]
        return [text[start:stop] for start, stop in itertools.pairwise([0, *edges, len(text)])]

    def count(self, text: str) -> int:
        """Number of tokens of an untrusted text."""
        return len(self._spans(text))

    def shorten(self, text: str, max_tokens: int, keep: Side = "middle") -> str:
        """Cut an untrusted text to at most ``max_tokens`` tokens, the notice of the cut included.

        ``left`` keeps the beginning, ``right`` the end, ``middle`` drops the middle.
        """
        reach = max_tokens * self._longest  # characters that could at most fit
        head, tail = cleaned(text[:reach]), cleaned(text[max(len(text) - reach, 0) :])
        head_spans = self._spans(head)
        if len(text) <= reach and len(head_spans) <= max_tokens:
            return text
        tail_spans = head_spans if len(text) <= reach else self._spans(tail)
        notice = _NOTICES[keep] if self.count(_NOTICES[keep]) < max_tokens else ""
        budget = max_tokens - self.count(notice)
        while budget > 0:
            first = min({"left": budget, "middle": budget // 2, "right": 0}[keep], len(head_spans))
            last = min({"left": 0, "middle": budget - budget // 2, "right": budget}[keep], len(tail_spans))
            begin = head[: head_spans[first - 1][1]] if first else ""
            end = tail[tail_spans[len(tail_spans) - last][0] :] if last else ""
            short = begin + notice + end
            # A cut through a character or a word may cost more tokens than it saves.
            excess = self.count(short) - max_tokens
            if excess <= 0:
                return short
            budget -= excess
        return ""

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """First and last position of the characters of each token of an untrusted text."""
        anchor = _OPEN + _CLOSE
        spans = self._core.encode(anchor + cleaned(text), add_special_tokens=False).offsets[1:]
        return [(first - len(anchor), last - len(anchor)) for first, last in spans]


_control_tokens: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, ControlTokens]] = WeakKeyDictionary()
_special: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, re.Pattern[str]]] = WeakKeyDictionary()
_making = threading.Lock()


def control_tokens_of(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer with its chat template; made once, as that copies the vocabulary.

    Raises:
        ConfigError: the tokenizer is not one of the ``tokenizers`` library.
    """
    state = len(tokenizer), str(tokenizer.chat_template)  # what may have changed since
    with _making:
        cached = _control_tokens.get(tokenizer)
        if cached is None or cached[0] != state:
            cached = _control_tokens[tokenizer] = state, ControlTokens(tokenizer, state[1])
    return cached[1]


def has_special(value: object, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a JSON value has text of a special token, or one of the characters that mark these here."""
    cached = _special.get(tokenizer)
    if cached is None or cached[0] != len(tokenizer):
        added = tokenizer.added_tokens_decoder.values()
        special = _any_of([token.content for token in added if token.special and len(token.content) > 1])
        cached = _special[tokenizer] = len(tokenizer), special
    return any(_UNUSABLE.search(text) or cached[1].search(text) for text in _texts(value))


def is_marked(rendered: str) -> bool:
    """Return whether a rendered text has marks of :meth:`ControlTokens.guard`."""
    return _BROKEN in rendered


def plain(guarded: str) -> str:
    """A guarded text without its marks."""
    return guarded.replace(_BROKEN, "")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def cleaned(text: str) -> str:
    """The text with U+FFFD in place of the noncharacters that are used here and of halves of characters."""
    return text if text.isascii() else _UNUSABLE.sub("\ufffd", text)


def _opening(token: str) -> str:
    """``<think>`` for ``</think>``."""
    return token.replace("/", "", 1)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern for the longest of ``texts`` at a place."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else _NOTHING


def _without_added_tokens(tokenizer: Any, private: Mapping[str, str], control: Collection[str]) -> Tokenizer:
    """A copy of the tokenizer's core that finds no added token in a text."""
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    data |= {"added_tokens": [], "truncation": None, "padding": None}
    core = Tokenizer.from_str(json.dumps(data))
    # A model whose vocabulary holds control tokens as ordinary pieces, as Unigram's does, would still find them.
    numbers = tokenizer.get_vocab()
    spelled = {text for text in control if numbers[text] in core.encode(text, add_special_tokens=False).ids}
    if not spelled:
        return core
    model = data["model"]
    rename = {text: private[text] for text in spelled}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {rename.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[rename.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in spelled]
    if model.get("unk_token") in rename:
        model["unk_token"] = rename[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(data))
