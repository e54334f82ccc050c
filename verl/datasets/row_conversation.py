"""Conversation of a row of a file: its messages, the tools of the model, and whether the model thinks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from verl.datasets.chat import Message, as_messages, shown
from verl.datasets.template_probes import TemplateForms
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def row_messages(prompt: object, where: str) -> list[Message]:
    """Validate the messages of a row as :func:`as_messages` does, and decode the arguments of their tool calls.

    OpenAI's form of arguments is JSON text; here they are mappings, and :func:`render` writes what the template takes.
    A call without arguments has none to give.
    """
    return [
        _with_decoded_calls(message, f"{where}: message {n}") for n, message in enumerate(as_messages(prompt, where))
    ]


def _with_decoded_calls(message: Message, where: str) -> Message:
    if message.get("function_call"):
        raise DataError(
            f"{where} has function_call, which chat templates do not write. Give the call as tool_calls: "
            "[{'type': 'function', 'function': {'name': ..., 'arguments': {...}}}]."
        )
    calls = decoded_json(message.get("tool_calls"), f"{where}: tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list):
        raise DataError(f"{where}: tool_calls is {shown(calls)}. Expected a list of calls.")
    return message | {"tool_calls": [_decoded_call(call, f"{where}: call {n}") for n, call in enumerate(calls)]}


def _decoded_call(call: Any, call_name: str) -> Message:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{call_name} is {shown(call)}. Expected {{'type': 'function', 'function': {{'name': ..., 'arguments': "
            "{...}}}."
        )
    where = f"{call_name}: the arguments of {function['name']}"
    arguments = decoded_json(function.get("arguments"), where)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where} are {shown(arguments)}. Expected an object, or its JSON text.")
    outer = call if "function" in call else {}  # a bare function is that of a call, too
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}


def require_written_calls(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Check that the chat template writes the tool calls of messages, if there are any.

    Raises:
        DataError: it does not.
    """
    if (
        any(message.get("tool_calls") for message in messages)
        and not TemplateForms.from_tokenizer(tokenizer).writes_calls
    ):
        raise DataError(
            f"{where} has tool calls, and the chat template of '{tokenizer.name_or_path}' does not write them: the "
            "turn would be empty. Take a template that does (custom_chat_template), or write the calls into the "
            "content."
        )


def decoded_json(value: object, what: str) -> Any:
    """Return a value of a row that may be given as JSON text; None for an empty text.

    Raises:
        DataError: the text is no JSON, as NaN is none; ``what`` (file, row and what it is) is named.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=refuse) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} are not valid JSON ({error}): {value!r:.80}.") from error


def row_template_kwargs(
    row: Mapping[str, object],
    tools_key: str | None,
    thinking_key: str | None,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
) -> dict[str, object]:
    """Return the variables of the chat template that a row gives: its ``tools`` and ``enable_thinking``.

    Args:
        row: of a file.
        tools_key: column of descriptions of tools (a list, or its JSON text); None reads none.
        thinking_key: column of the switch for thinking; None reads none.
        tokenizer: its template must write tools, if the row has some.
        where: file and row, for errors.

    Raises:
        DataError: a value cannot be used, or the template does not write tools.
    """
    kwargs: dict[str, object] = {}
    tools = decoded_json(row.get(tools_key or ""), f"{where}: the {tools_key}")
    if not isinstance(tools, list | None):
        raise DataError(f"{where}: the {tools_key} are {type(tools).__name__}, not a list: {tools!r:.80}.")
    if tools:
        kwargs["tools"] = [_described_tool(tool, f"{where}: {tools_key}[{n}]") for n, tool in enumerate(tools)]
        if not TemplateForms.from_tokenizer(tokenizer).writes_tools:
            raise DataError(
                f"{where} has {tools_key}, and the chat template of '{tokenizer.name_or_path}' does not write tools: "
                "the model would never see them. Take a template that does (custom_chat_template), or set "
                "tools_key=null, which leaves the column unread."
            )
    thinking = row.get(thinking_key or "")
    if thinking is not None:
        if thinking not in (True, False):
            raise DataError(f"{where}: {thinking_key} is {shown(thinking)}. Expected true or false.")
        kwargs["enable_thinking"] = bool(thinking)
    return kwargs


def _described_tool(value: object, where: str) -> Message:
    tool = decoded_json(value, where)
    if not isinstance(tool, Mapping):
        raise DataError(
            f"{where} is {shown(tool)}. Expected the description of a tool, {{'type': 'function', 'function': "
            "{'name': ..., 'parameters': {...}}}; for a column of other things set tools_key=null."
        )
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("parameters"), str):
        return dict(tool)
    changed = {**function, "parameters": decoded_json(function["parameters"], f"{where}: the parameters")}
    return {**tool, "function": changed} if "function" in tool else changed
