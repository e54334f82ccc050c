"""Convert prompts to messages, render them with the chat template, tokenize and truncate them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from verl.datasets.template_probes import TemplateForms
from verl.errors import ConfigError, DataError
from verl.utils.control_tokens import control_tokens_of, has_special, is_marked
from verl.vision.messages import bare_part, has_image_parts, is_image_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Truncation = Literal["error", "left", "right", "middle"]
T = TypeVar("T")

_PROBE = [{"role": "user", "content": "the question"}, {"role": "assistant", "content": "the answer"}]

MEDIA = ("image", "image_url", "video", "audio", "input_audio")


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that cannot turn messages into a prompt, or writes nothing of them."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no chat template, so messages cannot be turned into a "
            "prompt. Give one (custom_chat_template='...'), add chat_template to its tokenizer_config.json, or use the "
            "tokenizer of the model's chat or instruct variant (tokenizer_path)."
        )
    try:
        written = tokenizer.apply_chat_template(_PROBE, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template cannot be read: {error} (line {error.lineno}).") from error
    except (TemplateError, TypeError):
        return  # it refuses these messages; rows with others may suit it
    if not any(message["content"] in written for message in _PROBE):
        raise ConfigError(
            f"the chat template writes nothing of the messages: of {_PROBE} it makes {written!r:.120}. Every prompt "
            "would be this text. Give another one (custom_chat_template='...')."
        )


def require_usable(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer has a chat template and a pad token."""
    require_chat_template(tokenizer)
    if tokenizer.pad_token_id is None:
        raise DataError(
            f"the tokenizer '{tokenizer.name_or_path}' has no pad token, so rows cannot be brought to one length. "
            "Load it with verl.utils.hf_tokenizer, or set tokenizer.pad_token = tokenizer.eos_token."
        )


def as_messages(prompt: object, where: str, with_images: bool = False) -> list[Message]:
    """Validate a prompt, a string or a list of messages, and return it as a list of messages.

    A string becomes one user message. Keys with value None are dropped, except ``content``: parquet gives every message
    all keys of the column, and templates may test for a key. Text parts are joined to one string, as text-only
    templates would print the list as Python code. With ``with_images`` contents that have image parts stay lists, of
    ``{"type": "image"}`` and text parts. ``place`` (file and row) is named in errors.
    """
    if isinstance(prompt, str):
        _refuse_json(prompt, where)
        return [{"role": "user", "content": _content({"content": prompt}, f"{where}: the text")}]
    expected = "Expected a list of {'role': ..., 'content': ...}, or a string."
    if not isinstance(prompt, Sequence) or len(prompt) == 0:
        raise DataError(f"{where}: the prompt is {shown(prompt)}. {expected}")
    messages = []
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: message {index} is {shown(message)}. {expected}")
        fields = {key: value for key, value in message.items() if value is not None or key == "content"}
        if not isinstance(fields.get("role"), str):
            raise DataError(f"{where}: message {index} has no role: {shown(message)}. {expected}")
        here = f"{where}: message {index}"
        messages.append(fields | {"content": _content(fields, here, with_images)})
    return messages


def _refuse_json(text: str, where: str) -> None:
    """Refuse messages stored as JSON text, which would be trained on with their brackets and quotes."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return
    try:
        value = json.loads(text)
    except ValueError:
        return
    if value and all(isinstance(message, Mapping) and "role" in message for message in value):
        raise DataError(
            f"{where}: messages are JSON text {text!r:.80}. Write them as a list: call json.loads(text) before you "
            "create the file."
        )


def _content(message: Message, where: str, with_images: bool = False) -> str | list[Message] | None:
    content = message.get("content")
    if with_images and has_image_parts(content):
        parts: list[Message] = [
            bare_part(part) if is_image_part(part) else {"type": "text", "text": _content({"content": [part]}, where)}
            for part in content or ()
        ]
        return [part for part in parts if part.get("text") != ""]
    if content is None and message.get("tool_calls"):
        return None
    if not isinstance(content, str):
        content = "".join(_parts(content, where))
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half a character, {error.object[error.start]!r}, which no tokenizer reads."
        ) from error
    return content


def _parts(content: object, where: str) -> Iterator[str]:
    """The texts of content parts, each ``{"type": "text", "text": ...}``."""
    if not isinstance(content, list) or not content:
        raise DataError(f"{where} has content {shown(content)}. Expected a string or a list of parts.")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in MEDIA:
            raise DataError(
                f"{where} contains {kind}, which is not read here: rows of main_ppo and sft_trainer may have images "
                "and videos, for a model with an image processor. Take such rows out."
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where} has the part {shown(part)}. Expected {{'type': 'text', 'text': ...}}.")
        yield part["text"]


def shown(value: object) -> str:
    """Return the type and the beginning of a value, for error messages."""
    return f"{type(value).__name__} {value!r:.120}"


def render(messages: list[Message], tokenizer: Any, where: str, **template_kwargs: Any) -> str:
    """Render checked messages with the tokenizer's chat template.

    ``template_kwargs`` are variables of the template: add_generation_prompt, tools, enable_thinking, ... A template may
    refuse messages (for roles in a wrong order, for example); the ``DataError`` then names ``place``.
    """
    if any(message.get("tool_calls") for message in messages):
        messages = TemplateForms.from_tokenizer(tokenizer).adapted(messages)
    with refusals(messages, where):
        return tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)


@contextmanager
def refusals(messages: list[Message], where: str) -> Iterator[None]:
    """Turn errors by which a template refuses messages into a :class:`DataError` that names ``place``."""
    try:
        yield
    except (TemplateError, TypeError) as error:
        roles = [message["role"] for message in messages]
        raise DataError(f"{where}: the chat template refuses the messages (roles {roles}): {error}.") from error


def render_prompt(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    add_generation_prompt: object = True,
    **template_kwargs: object,
) -> str:
    """Render checked messages of a prompt, and the header of the turn that answers it (``add_generation_prompt``).

    The text of a special token inside a message, or a description of a tool, stays text: it is marked for
    :func:`encode`. In results of tools this holds for all control tokens; in turns of the assistant, which hold
    thoughts and calls, they are control tokens.

    Raises:
        DataError: the template refuses the messages, or they hold such a text and the tokenizer is not one of the
            ``tokenizers`` library, which alone can keep it.
    """
    tools = template_kwargs.get("tools")
    is_fast, needs_marks = getattr(tokenizer, "is_fast", False), has_special([messages, tools], tokenizer)
    if needs_marks and not is_fast:
        raise DataError(
            f"{where} has the text of a special token, which this tokenizer ({type(tokenizer).__name__}) cannot keep "
            "apart from the token. Take it out of the message, or use a model that ships tokenizer.json."
        )
    if needs_marks or (is_fast and any(message["role"] == "tool" for message in messages)):
        control = control_tokens_of(tokenizer)
        messages = [control.guard_prompt(message) for message in messages]
        template_kwargs |= {"tools": control.guard(tools, "prompt")} if tools else {}
    return render(messages, tokenizer, where, add_generation_prompt=add_generation_prompt, **template_kwargs)


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize a rendered text without adding special tokens, which the template has written already."""
    if is_marked(text):
        return control_tokens_of(tokenizer).encode(text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def token_lengths(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, workers: int = 1) -> list[int]:
    """Count the tokens of each rendered text.

    With ``workers`` > 1 in parallel threads (fast tokenizers release the GIL), each with its own copy of the tokenizer,
    which is not thread-safe.
    """
    if workers <= 1 or len(texts) < 2 * workers:
        return _lengths(texts, tokenizer)
    size = -(-len(texts) // workers)
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    copies = [copy.deepcopy(tokenizer) for _ in parts]
    with ThreadPoolExecutor(workers) as pool:
        return [length for part in pool.map(_lengths, parts, copies) for length in part]


def _lengths(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not texts:
        return []
    lengths = [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    return [len(encode(text, tokenizer)) if is_marked(text) else n for text, n in zip(texts, lengths, strict=True)]


def truncate(items: list[T], max_length: int, truncation: Truncation, where: str, setting: str) -> list[T]:
    """Cut a list of values per token to ``max_length``.

    ``left`` drops the beginning, ``right`` the end, ``middle`` the middle (``max_length // 2`` items are kept at the
    beginning, the rest at the end), ``error`` raises. ``place`` (file and row) and ``setting`` (the key of
    ``max_length``) are named in the ``DataError``.
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
        f"{where} has {len(items)} tokens, more than {setting}={max_length}. Raise {setting}, "
        "or set truncation to left, right or middle"
        + (", or filter_overlong_prompts=true." if setting == "max_prompt_length" else ".")
    )


def common_prefix_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the number of leading items that two sequences share."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def extract_system_prompt_and_generation(
    tokenizer: PreTrainedTokenizerBase, **apply_chat_template_kwargs: Any
) -> tuple[list[int], list[int]]:
    """Return the tokens that a template puts before the first message, and those that open an answer.

    The first are what one message has more than a second one adds; it must be a template that treats both alike.
    """
    from verl.utils.tokenizer import normalize_token_ids  # imports Transformers

    message = {"role": "user", "content": ""}

    def ids(count: int, opened: bool) -> list[int]:
        settings: dict[str, Any] = {"add_generation_prompt": opened} | apply_chat_template_kwargs
        return normalize_token_ids(tokenizer.apply_chat_template([message] * count, tokenize=True, **settings))

    single, double, opened = ids(1, False), ids(2, False), ids(1, True)
    return single[: len(single) - (len(double) - len(single))], opened[len(single) :]
