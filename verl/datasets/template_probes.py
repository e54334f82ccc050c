"""Abilities of a chat template, detected by rendering short conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jinja2.exceptions import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "verl_probe"
_TOOLS = [
    {
        "type": "function",
        "function": {"name": _PROBE, "description": "-", "parameters": {"type": "object", "properties": {}}},
    }
]
_USER_MESSAGE = {"role": "user", "content": "-"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"value": _PROBE}}}
_ASSISTANT_MESSAGE = {"role": "assistant", "content": _PROBE}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "-"}


@dataclass(frozen=True)
class TemplateForms:
    """Abilities of a chat template.

    Attributes:
        text_arguments: arguments of tool calls are JSON text; if false, a mapping.
        writes_calls: tool calls are part of the assistant's turn.
        writes_tools: descriptions of tools are part of the prompt.
        ends_turns: the assistant's turn ends with a token of its own.
        next_tokens: tokens that begin the next message, which end a turn where none of its own does: after a text that
            of the user's message, after calls that of a result; empty texts where there is none.
    """

    text_arguments: bool
    writes_calls: bool
    writes_tools: bool
    ends_turns: bool
    next_tokens: tuple[str, str]

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> TemplateForms:
        """Return the abilities of a tokenizer's template, probed once for each tokenizer."""
        template = str(tokenizer.chat_template)
        cached = _forms_of.get(tokenizer)
        if cached is None or cached[0] != template:
            calling = _rendered(tokenizer, [_USER_MESSAGE, _CALLING])
            # A template that joins texts refuses a mapping, or writes it as Python does.
            text_arguments = calling is None or _PROBE not in calling or f"{{'value': '{_PROBE}'" in calling
            as_text = _rendered(tokenizer, [_USER_MESSAGE, with_arguments(_CALLING, as_text=True)]) or ""
            writes_calls = not text_arguments or _PROBE in as_text
            prompts = [
                _rendered(tokenizer, [*system, _USER_MESSAGE]) for system in ([], [{"role": "system", "content": "-"}])
            ]
            written = [prompt for prompt in prompts if prompt is not None]
            writes_tools = not written or any(_PROBE in prompt for prompt in written)
            answered = _rendered(tokenizer, [_USER_MESSAGE, _ASSISTANT_MESSAGE], tools=None)
            end = None if answered is None else answered.rpartition(_PROBE)[2]
            ends_turns = end is None or any(token in end for token in added_tokens(tokenizer))
            after_text = _next_token(tokenizer, _ASSISTANT_MESSAGE, _USER_MESSAGE)
            after_calls = _next_token(tokenizer, with_arguments(_CALLING, text_arguments), _RESULT) or after_text
            forms = cls(text_arguments, writes_calls, writes_tools, ends_turns, (after_text, after_calls))
            cached = _forms_of[tokenizer] = template, forms
        return cached[1]

    def next_token(self, turn: Mapping[str, object]) -> str:
        """Return the token of the next message that ends a turn of the assistant; empty if it has an end of its own."""
        return "" if self.ends_turns else self.next_tokens[bool(turn.get("tool_calls"))]

    def adapted(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Return messages with the arguments of their calls as the template takes them."""
        return [with_arguments(message, self.text_arguments) for message in messages]


_forms_of: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, TemplateForms]] = WeakKeyDictionary()


def with_arguments(message: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text, or as mappings; text that is no JSON stays."""
    if not message.get("tool_calls"):
        return dict(message)
    return {**message, "tool_calls": [_adapted_call(call, as_text) for call in message["tool_calls"]]}


def _adapted_call(call: Mapping[str, Any], as_text: bool) -> dict[str, object]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            read = arguments
        arguments = read if isinstance(read, dict) else arguments
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def added_tokens(tokenizer: Any) -> list[str]:
    """Return the texts of special tokens, and of others that stand outside the vocabulary of words."""
    return [*{*(token.content for token in tokenizer.added_tokens_decoder.values()), *tokenizer.all_special_tokens}]


def writes_field(tokenizer: Any, role: str, field: str) -> bool:
    """Return whether the template writes a field of messages of a role, or refuses such a message."""
    before = [] if role in ("user", "system") else [_USER_MESSAGE]
    text = _rendered(tokenizer, [*before, {"role": role, "content": "-", field: _PROBE}], tools=None)
    return text is None or _PROBE in text


def _next_token(tokenizer: Any, turn: dict[str, Any], following: dict[str, Any]) -> str:
    """Return the token that the template writes between a turn and the text of the following message, if any."""
    closed, continued = (
        _rendered(tokenizer, [_USER_MESSAGE, turn, *more], tools=None) or "" for more in ([], [following])
    )
    rest = continued.removeprefix(closed) if closed else ""
    return max((token for token in added_tokens(tokenizer) if rest.startswith(token)), key=len, default="")


def _rendered(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = _TOOLS
) -> str | None:
    """Return a conversation as text; None if the template refuses it."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except (TemplateError, TypeError):
        return None
