"""Render messages with a chat template, and what follows a turn of the policy as a difference of two renderings."""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from verl.base.types import JsonMapping, JsonObject
from verl.config import PPOConfig
from verl.datasets.chat import (
    Message,
    as_messages,
    common_prefix_length,
    refusals,
    render,
    require_chat_template,
)
from verl.datasets.template_probes import TemplateForms, with_arguments
from verl.errors import DataError
from verl.utils.control_tokens import MARK, Author, ControlTokens
from verl.utils.model import eos_token_ids
from verl.utils.transformers_private import json_renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SanityCheck = Literal["strict", "ignore_strippable", "disable"]
Tools = list[JsonObject]

PLACE = "the conversation"
"""Name of the rendered messages in error messages."""
MAX_CACHED_CHARACTERS = 4_000_000
"""Characters of rendered texts, and of what they were rendered from, that are kept for the same messages."""
_TOOLS: Tools = [
    {
        "type": "function",
        "function": {"name": "probe", "description": "-", "parameters": {"type": "object", "properties": {}}},
    }
]


@dataclass(frozen=True)
class Continuation:
    """Tokens that a template writes from the end of one turn of the assistant to the header of the next.

    Where the template ends a turn with a token, ``ids`` begin with it, and ``ends`` are the tokens that stand for it:
    some templates end the last turn with another one than earlier turns.
    """

    ids: list[int]
    ends: frozenset[int]


class ChatTemplate:
    """A tokenizer with its chat template. It holds no state of a conversation, and threads may share it.

    Texts of messages never become control tokens, see :meth:`verl.utils.control_tokens.ControlTokens.guard`.

    Templates differ in what they take. Found out once, by rendering short conversations:

    - whether arguments of tool calls are a mapping, or JSON text;
    - whether there is a role ``tool``; if not, results are given as a message of the user;
    - whether the user may speak twice in a row; if not, such messages are joined to one.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        sanity_check: what :meth:`verl.agents.conversation.Conversation.check` compares
            (``multi_turn.tokenization_sanity_check_mode``).
        template_kwargs: variables of the template, such as ``enable_thinking``.
        end_token_ids: tokens at which the engine ends a response; the tokenizer's own end token is always one.
        use_inference_chat_template: let the template rewrite history between turns; see
            :class:`verl.agents.conversation.Conversation`.

    Raises:
        ConfigError: the tokenizer has no chat template, or is not one of the ``tokenizers`` library.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        sanity_check: SanityCheck = "strict",
        template_kwargs: JsonMapping | None = None,
        end_token_ids: Iterable[int] = (),
        use_inference_chat_template: bool = False,
    ) -> None:
        require_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self.sanity_check = sanity_check
        self.use_inference_chat_template = use_inference_chat_template
        self.end_token_ids = frozenset({*end_token_ids, tokenizer.eos_token_id} - {None})
        self.control = ControlTokens(tokenizer, str(tokenizer.chat_template))
        self._kwargs = dict(template_kwargs or {})
        self._render_json = json_renderer(tokenizer, self._kwargs)
        self._guarded: tuple[Tools | None, Tools | None] = None, None
        self._rendered = _Rendered()
        self._warned_kinds: set[str] = set()
        self._telling = threading.Lock()
        self._by_thinking: dict[bool, ChatTemplate] = {}
        self._forms = TemplateForms.from_tokenizer(tokenizer)
        self._joins_users, self._has_tool_role = False, True
        calling = [_user("-"), _stand_in([_call("probe", "call00000")])]
        self._joins_users = not self._writes([_user("-"), _user(MARK)], MARK)
        result = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": "a result"}
        self._has_tool_role = self._writes([*calling, result], "a result", _TOOLS)

    @classmethod
    def from_config(cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Make the template of a run's policy.

        Raises:
            ConfigError: the tokenizer cannot be used.
        """
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        return cls(
            tokenizer,
            sanity_check=rollout.multi_turn.tokenization_sanity_check_mode,
            use_inference_chat_template=rollout.multi_turn.use_inference_chat_template,
            template_kwargs=config.data.apply_chat_template_kwargs,
            end_token_ids=(*eos_token_ids(model.path, tokenizer), *rollout.stop_token_ids),
        )

    def with_thinking(self, enable_thinking: bool | None) -> ChatTemplate:
        """Return the template with a row's ``enable_thinking``; None leaves that of the run."""
        if enable_thinking is None:
            return self
        with self._telling:
            template = self._by_thinking.get(bool(enable_thinking))
            if template is None:
                template = copy.copy(self)
                template._kwargs = self._kwargs | {"enable_thinking": bool(enable_thinking)}
                template._render_json = json_renderer(self.tokenizer, template._kwargs)
                template._rendered = _Rendered()
                self._by_thinking[bool(enable_thinking)] = template
        return template

    def prompt(self, messages: list[Message], tools: Tools | None = None) -> list[int]:
        """Tokens of a prompt, the header of the assistant's turn included."""
        return self.encoded([self.prepare(message, "prompt") for message in messages], self.guarded(tools), True)

    def prepare(
        self, message: Message, author: Author, assistant: Author = "policy", with_images: bool = False
    ) -> Message:
        """Check a message and mark its texts so that they cannot become control tokens.

        In a prompt, results of tools are taken as a program's, and earlier turns of the assistant as written by
        ``assistant``. Image parts stay parts of the content if it may have them.
        """
        is_prompt = author == "prompt" and isinstance(message, Mapping)
        guarded = self.control.guard_prompt(message, assistant) if is_prompt else self.control.guard(message, author)
        [checked] = as_messages([guarded], PLACE, with_images)
        return checked

    def guarded(self, tools: Tools | None) -> Tools | None:
        """Tools whose descriptions are marked like the texts of a prompt; warns if the template does not write them."""
        if tools and not self._forms.writes_tools:
            self.warn_once(
                "tools",
                "the chat template of '%s' does not write tools: the model sees none of %s, unless the prompts "
                "describe them. Take a template that does (model.custom_chat_template).",
                self.tokenizer.name_or_path,
                ", ".join(str(tool.get("function", tool).get("name")) for tool in tools),
            )
        guarded_for, guarded = self._guarded
        if tools != guarded_for:  # all conversations of a process have the same tools
            guarded = self.control.guard(tools, "prompt")
            self._guarded = copy.deepcopy(tools), guarded
        return guarded

    def encoded(self, prepared: list[Message], tools: Tools | None, add_generation_prompt: bool) -> list[int]:
        """Tokens of prepared messages."""
        return self.control.encode(self._text(prepared, tools, add_generation_prompt))

    def after_turn(
        self, before: list[Message], turn: Message, following: list[Message], tools: Tools | None
    ) -> Continuation:
        """Tokens from the end of an assistant's ``turn`` to the header of its next one, with ``following`` between.

        They are the difference of two renderings of a short conversation: ``before`` (the first prompt), one turn with
        calls of the same names, and ``following``, all prepared. So the work does not grow with the number of turns,
        and what the template would rewrite in earlier turns does not matter.
        """
        closed, continued = self._around_turn(before, turn, following, tools)
        ended = closed.rstrip()
        last_end = self.control.last_special(ended)
        common = self._common(ended, continued).rstrip()
        end, start = self.control.last_special(common), len(common)
        if end:
            start -= len(end)
        elif common != ended and (match := self.control.next_special(continued, start)):
            end, start = match[0], match.start()  # some templates end the last turn with another token
        ends = frozenset(self.control.special[token] for token in (end, last_end) if token) if end else frozenset()
        return Continuation(self.control.encode(continued[start:], after_token=True), ends)

    def warn_once(self, kind: str, message: str, *args: object) -> None:
        """Warn, once for each kind."""
        with self._telling:
            is_repeated = kind in self._warned_kinds
            self._warned_kinds.add(kind)
        if not is_repeated:
            logger.warning(message, *args)

    def _common(self, a: str, b: str) -> str:
        """The common beginning of two texts, without a part of a special token."""
        a_parts, b_parts = self.control.split(a), self.control.split(b)
        same = common_prefix_length(a_parts, b_parts)
        common = "".join(a_parts[:same])
        if same < min(len(a_parts), len(b_parts)) and not {a_parts[same], b_parts[same]} & self.control.special.keys():
            common += a_parts[same][: common_prefix_length(a_parts[same], b_parts[same])]
        return common

    def _around_turn(
        self, before: list[Message], turn: Message, following: list[Message], tools: Tools | None
    ) -> tuple[str, str]:
        """Return the text rendered after a turn, first as the last turn and then with ``following`` after it."""
        refusal: DataError | None = None
        for calls in _possible_calls(turn, following):
            spoken = [*before, _stand_in(calls)]
            try:
                closed = self._text(spoken, tools, False)
                continued = self._text([*spoken, *following], tools, True)
            except DataError as error:
                refusal = refusal or error
                continue
            if MARK in closed and MARK in continued:
                return closed.rpartition(MARK)[2], continued.rpartition(MARK)[2]
        raise refusal or DataError(
            f"{PLACE}: the chat template leaves out the assistant's turn, so what follows it cannot be rendered."
        )

    def _writes(self, prepared: list[Message], expected: str, tools: Tools | None = None) -> bool:
        """Return whether the template takes the messages and writes the expected text."""
        try:
            return expected in self._text(prepared, tools, False)
        except DataError:
            return False

    def _text(self, prepared: list[Message], tools: Tools | None, add_generation_prompt: bool) -> str:
        kwargs = self._kwargs | ({"tools": tools} if tools else {})
        messages = self._adapted(prepared)
        try:
            key = json.dumps([messages, tools, add_generation_prompt])
        except (TypeError, ValueError, RecursionError):  # not all are values of JSON
            return render(messages, self.tokenizer, PLACE, add_generation_prompt=add_generation_prompt, **kwargs)
        text = self._rendered.find(key)
        if text is None:
            plain, plain_tools, _ = json.loads(key)
            if self._render_json is None or not messages or plain != messages or plain_tools != tools:
                text = render(messages, self.tokenizer, PLACE, add_generation_prompt=add_generation_prompt, **kwargs)
            else:
                with refusals(messages, PLACE):
                    text = self._render_json(plain, plain_tools or None, add_generation_prompt)
            self._rendered.keep(key, text)
        return text

    def _adapted(self, prepared: list[Message]) -> list[Message]:
        """The messages in the form that the template takes."""
        adapted: list[Message] = []
        for message in prepared:
            message = with_arguments(message, self._forms.text_arguments)
            if message["role"] == "tool" and not self._has_tool_role:
                message = {"role": "user", "content": message["content"]}
            if self._joins_users and adapted and message["role"] == adapted[-1]["role"] == "user":
                adapted[-1] = message | {"content": _joined(adapted[-1]["content"], message["content"])}
            else:
                adapted.append(message)
        return adapted


class _Rendered:
    """The texts rendered last. The responses to a prompt have it in common, and what surrounds their first turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._size = 0

    def find(self, key: str) -> str | None:
        with self._lock:
            if (text := self._texts.get(key)) is not None:
                self._texts.move_to_end(key)
            return text

    def keep(self, key: str, text: str) -> None:
        with self._lock:
            if key in self._texts:
                return
            self._texts[key] = text
            self._size += len(key) + len(text)
            while self._size > MAX_CACHED_CHARACTERS:
                old = self._texts.popitem(last=False)
                self._size -= len(old[0]) + len(old[1])


def _joined(first: Any, second: Any) -> Any:
    """Contents of two messages of the user as that of one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content for content in (first, second)
    ]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _call(name: str, call_index: str) -> JsonObject:
    return {"id": call_index, "type": "function", "function": {"name": name, "arguments": {"value": MARK}}}


def _stand_in(calls: list[JsonObject]) -> Message:
    """A turn of the assistant whose text ends with a mark, before what the template itself writes.

    Calls hold the mark in their arguments, as some templates write results between the calls and the content.
    """
    return (
        {"role": "assistant", "content": "", "tool_calls": calls} if calls else {"role": "assistant", "content": MARK}
    )


def _possible_calls(turn: Message, following: list[Message]) -> Iterator[list[JsonObject]]:
    """Calls of a stand-in for ``turn``: as many as it made; else the first, as some templates take one call only; else
    none, as some refuse a message of the user after results.
    """
    calls = [_call(call["function"]["name"], call["id"]) for call in turn.get("tool_calls") or []]
    if not calls:  # what looked like a call and was none is answered, too
        results = [message for message in following if message["role"] == "tool"]
        calls = [_call(result["name"], result["tool_call_id"]) for result in results]
    yield calls
    if len(calls) > 1:
        yield calls[:1]
    if calls:
        yield []
