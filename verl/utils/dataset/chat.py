"""Messages to text, text to token ids, and token ids to a fixed length."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from jinja2.exceptions import TemplateError

from verl.errors import DataError
from verl.utils.tokenizer import require_chat_template

Message = dict[str, Any]
Truncation = Literal["error", "left", "right", "middle"]
T = TypeVar("T")

MEDIA = ("image", "image_url", "video", "audio", "input_audio")


def require_usable(tokenizer: Any) -> None:
    """Check that a tokenizer can turn messages into a prompt, and pad it.

    Raises:
        ConfigError: it has no chat template.
        DataError: it has no pad token.
    """
    require_chat_template(tokenizer)
    if tokenizer.pad_token_id is None:
        raise DataError(
            f"the tokenizer '{tokenizer.name_or_path}' has no pad token, so rows cannot be brought to one length. "
            "Load it with verl.utils.hf_tokenizer, or set tokenizer.pad_token = tokenizer.eos_token."
        )


def as_messages(prompt: Any, place: str) -> list[Message]:
    """A prompt as a list of messages, checked.

    A plain string is one user message. Keys whose value is None are dropped (parquet gives every
    message all keys of the column), except ``content``: a template may test for a key. Content in
    parts of text becomes one text: templates for text alone would write a list as Python shows it.

    Args:
        prompt: ``[{"role": ..., "content": ...}, ...]`` or a string.
        place: file and row, for error messages.

    Raises:
        DataError: anything else.
    """
    if isinstance(prompt, str):
        _refuse_json(prompt, place)
        return [{"role": "user", "content": _content({"content": prompt}, f"{place}: the text")}]
    expected = "Expected a list of {'role': ..., 'content': ...}, or a string."
    if not isinstance(prompt, Sequence) or len(prompt) == 0:
        raise DataError(f"{place}: the prompt is {_shown(prompt)}. {expected}")
    messages = []
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise DataError(f"{place}: message {number} is {_shown(message)}. {expected}")
        kept = {key: value for key, value in message.items() if value is not None or key == "content"}
        if not isinstance(kept.get("role"), str):
            raise DataError(f"{place}: message {number} has no role: {_shown(message)}. {expected}")
        messages.append(kept | {"content": _content(kept, f"{place}: message {number}")})
    return messages


def _refuse_json(text: str, place: str) -> None:
    """Messages that were written as text would be trained on with their brackets and quotes."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return
    try:
        value = json.loads(text)
    except ValueError:
        return
    if value and all(isinstance(message, Mapping) and "role" in message for message in value):
        raise DataError(
            f"{place}: messages are given as JSON text {text!r:.80}. Write them as a list: json.loads(text) before "
            "the file is made."
        )


def _content(message: Message, place: str) -> str | None:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None
    if not isinstance(content, str):
        content = "".join(_parts(content, place))
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half a character, {error.object[error.start]!r}, which no tokenizer reads."
        ) from error
    return content


def _parts(content: Any, place: str) -> Iterator[str]:
    """The texts of content in parts, ``{"type": "text", "text": ...}`` each."""
    if not isinstance(content, list) or not content:
        raise DataError(f"{place} has content {_shown(content)}. Expected a string or a list of parts.")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in MEDIA:
            raise DataError(f"{place} contains {kind}, and verl trains on text only for now. Take such rows out.")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{place} has the part {_shown(part)}. Expected {{'type': 'text', 'text': ...}}.")
        yield part["text"]


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.120}"


def render(messages: list[Message], tokenizer: Any, place: str, **template_kwargs: Any) -> str:
    """The text of a conversation by the tokenizer's chat template.

    Args:
        messages: checked messages.
        tokenizer: has a chat template.
        place: file and row, for error messages.
        template_kwargs: variables of the template: add_generation_prompt, tools, enable_thinking, ...

    Raises:
        DataError: the template refuses the messages (roles in a wrong order, for example).
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)
    except (TemplateError, TypeError) as error:
        roles = [message["role"] for message in messages]
        raise DataError(f"{place}: the chat template refuses the messages (roles {roles}): {error}.") from error


def encode(text: str, tokenizer: Any) -> list[int]:
    """Token ids of a rendered text; the template has already written the special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def token_lengths(texts: Sequence[str], tokenizer: Any, workers: int = 1) -> list[int]:
    """How many tokens each text has.

    Args:
        texts: rendered texts.
        tokenizer: every thread gets a copy of its own, because a tokenizer is not thread-safe.
        workers: threads; a fast tokenizer lets them run at the same time.
    """
    if workers <= 1 or len(texts) < 2 * workers:
        return _lengths(texts, tokenizer)
    size = -(-len(texts) // workers)
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    copies = [copy.deepcopy(tokenizer) for _ in parts]
    with ThreadPoolExecutor(workers) as pool:
        return [length for part in pool.map(_lengths, parts, copies) for length in part]


def _lengths(texts: Sequence[str], tokenizer: Any) -> list[int]:
    return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []


def truncate(items: list[T], max_length: int, truncation: Truncation, place: str, setting: str) -> list[T]:
    """Cut a list to ``max_length``.

    ``left`` drops the beginning, ``right`` the end, ``middle`` the middle (the first half, rounded
    down, and the rest from the end are kept), ``error`` raises.

    Args:
        items: token ids, or anything that goes along with them.
        max_length: longest result.
        truncation: which part to drop.
        place: file and row, for error messages.
        setting: the key that holds ``max_length``, for error messages.

    Raises:
        DataError: too long, and ``truncation`` is ``error`` or unknown.
    """
    if len(items) <= max_length:
        return items
    if truncation == "left":
        return items[len(items) - max_length :]
    if truncation == "right":
        return items[:max_length]
    if truncation == "middle":
        head = max_length // 2
        return items[:head] + items[len(items) - (max_length - head) :]
    raise DataError(
        f"{place} has {len(items)} tokens, more than {setting}={max_length}. Raise {setting}, "
        "or set data.truncation to left, right or middle"
        + (", or data.filter_overlong_prompts=true." if setting == "data.max_prompt_length" else ".")
    )


def rendered(
    prompts: Iterable[tuple[str, list[Message]]], tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> list[str]:
    """Texts of many prompts, each given with its place, ready for the model to answer."""
    return [
        render(messages, tokenizer, place, add_generation_prompt=True, **template_kwargs) for place, messages in prompts
    ]
