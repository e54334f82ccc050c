"""What a chat template takes, found out by rendering short conversations."""

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
_ASKED = {"role": "user", "content": "-"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"value": _PROBE}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass(frozen=True)
class TemplateForms:
    """What a chat template takes.

    Attributes:
        text_arguments: arguments of tool calls are JSON text; if false, a mapping.
        writes_calls: tool calls are part of the assistant's turn.
        writes_tools: descriptions of tools are part of the prompt.
    """

    text_arguments: bool
    writes_calls: bool
    writes_tools: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TemplateForms:
        """Return those of a tokenizer's template; found out once for each tokenizer."""
        template = str(tokenizer.chat_template)
        known = _found.get(tokenizer)
        if known is None or known[0] != template:
            calling = _rendered(tokenizer, [_ASKED, _CALLING])
            # A template that joins texts refuses a mapping, or writes it as Python does.
            text_arguments = calling is None or _PROBE not in calling or f"{{'value': '{_PROBE}'" in calling
            as_text = _rendered(tokenizer, [_ASKED, with_arguments(_CALLING, as_text=True)]) or ""
            writes_calls = not text_arguments or _PROBE in as_text
            prompts = [_rendered(tokenizer, [*system, _ASKED]) for system in ([], [{"role": "system", "content": "-"}])]
            written = [prompt for prompt in prompts if prompt is not None]
            writes_tools = not written or any(_PROBE in prompt for prompt in written)
            known = _found[tokenizer] = template, cls(text_arguments, writes_calls, writes_tools)
        return known[1]

    def adapted(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Return messages with the arguments of their calls as the template takes them."""
        return [with_arguments(message, self.text_arguments) for message in messages]


_found: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, TemplateForms]] = WeakKeyDictionary()


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


def _rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> str | None:
    """Return a conversation with tools as text; None if the template refuses it."""
    try:
        return tokenizer.apply_chat_template(messages, tools=_TOOLS, tokenize=False)
    except (TemplateError, TypeError):
        return None
