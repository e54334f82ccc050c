r"""Loss mask of a conversation: which tokens the assistant wrote.

The chat template renders the whole conversation once; those token ids are trained on. An assistant's turn begins after
the prompt that the model would get for it (the earlier messages with the generation prompt) and ends with its
end-of-turn token::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                         └──── loss ───┘

What follows that token (here a newline) is written by the template, never by the model. Some templates (GLM-4.5) end a
turn with the token that begins the next message; that token is trained on, and written after a last turn. At both ends
of a turn, the text so far must tokenize alone to a prefix of the whole's tokens; then training sees the same tokens as
a rollout. A turn must have every text of its message: templates leave out thoughts of turns before the last question.

A message of the assistant with ``loss_mask: 0``, ``weight: 0`` or ``trainable: false`` is context, without loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.datasets.chat import Message, common_prefix_length, encode, render
from verl.datasets.template_probes import TemplateForms, added_tokens, writes_field
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SWITCHES = ("loss_mask", "weight", "trainable")
"""Keys of a message that say whether it is trained on: 1 or 0, true or false."""
OTHER_SPELLINGS = {
    *("loss", "lossmask", "losson", "lossweight", "mask", "masked", "labelmask", "istrainable", "learn", "weights"),
    *("train", "trained", "training", "trainon", "trainonturn", "trainmask", "trainweight"),
}
"""Names of such keys elsewhere, in small letters and without ``_`` and ``-``."""
THOUGHTS = re.compile("reasoning|think|thought|refusal|^cot$", re.IGNORECASE)
"""Names of fields in which the assistant's message has more of what the model wrote than ``content``."""
REWRITTEN = (
    "Train on the last turn alone (trainable: false in earlier messages), write a row for each turn (docs, supervised "
    "data, has the lines), or take a template that leaves turns as they are (custom_chat_template). "
    "ignore_input_ids_mismatch=true trains on what the template writes."
)
"""Remedies where the template writes a turn otherwise than the model is to write it."""


def require_turn_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the chat template ends the assistant's turn with a token, of the turn or of the next message.

    Raises:
        ConfigError: it does not.
    """
    forms = TemplateForms.from_tokenizer(tokenizer)
    if not forms.ends_turns and not all(forms.next_tokens):
        raise ConfigError(
            f"the chat template of '{tokenizer.name_or_path}' writes no token of this tokenizer at the end of the "
            "assistant's turn, so the model would never learn to stop. Write one there, such as {{ eos_token }} "
            "(custom_chat_template), or add the text that it writes, such as <|im_end|>, to the special tokens."
        )


def render_conversation(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, where: str, **template_kwargs: object
) -> str:
    """Render a conversation, and after a last turn of the assistant the token that ends it, if the next message has it.

    Arguments are those of :func:`verl.datasets.chat.render`.
    """
    text = render(messages, tokenizer, where, **template_kwargs)
    is_turn = messages[-1]["role"] == "assistant"
    return text + TemplateForms.from_tokenizer(tokenizer).next_token(messages[-1]) if is_turn else text


def mask_assistant(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    row_name: str,
    strict: bool = True,
    first: int = 0,
    **template_kwargs: object,
) -> tuple[list[int], list[int]]:
    """Tokenize a conversation; return its ids and a mask of equal length, 1 for the assistant's tokens.

    Args:
        messages: checked messages.
        tokenizer: has a chat template.
        row_name: file and row, for error messages.
        strict: refuse a conversation in which the prompt of a turn is not a prefix of the whole, as text or as tokens.
            Otherwise turns are found by their header, and a boundary inside a token is moved to the token's end.
        first: number of the first message whose turn may be trained on; earlier ones are context.
        template_kwargs: template variables: tools, enable_thinking, ...
    """
    rendered = render_conversation(messages, tokenizer, row_name, **template_kwargs)
    ids = encode(rendered, tokenizer)
    mask = [0] * len(ids)
    for index, start, stop in _trained_turns(messages, rendered, tokenizer, row_name, strict, first, template_kwargs):
        where = f"{row_name}: message {index}"
        lost = _lost_text(messages[index], rendered[start:stop], tokenizer) if strict else ""
        if lost:
            raise DataError(f"{where}: the chat template leaves {lost} out of this turn. {REWRITTEN}")
        begin = _tokens_of_prefix(rendered[:start], ids, tokenizer, where, strict)
        end = _tokens_of_prefix(rendered[:stop], ids, tokenizer, where, strict)
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def lost_text(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    row_name: str,
    strict: bool = True,
    first: int = 0,
    **template_kwargs: object,
) -> str:
    """Return the first text of a turn to train on that the template leaves out, with its message; empty if none.

    Looks only at conversations that have more than one text in a message. Arguments are those of
    :func:`mask_assistant`.
    """
    texts = [list(_texts(message)) for message in messages[first:] if message["role"] == "assistant"]
    if all(len(fields) < 2 and "</think>" not in text for fields in texts for _, text in fields):
        return ""
    rendered = render_conversation(messages, tokenizer, row_name, **template_kwargs)
    turns = _trained_turns(messages, rendered, tokenizer, row_name, strict, first, template_kwargs)
    losses = ((index, _lost_text(messages[index], rendered[start:stop], tokenizer)) for index, start, stop in turns)
    return next((f"message {index}: {lost}" for index, lost in losses if lost), "")


def _trained_turns(
    messages: list[Message],
    rendered: str,
    tokenizer: PreTrainedTokenizerBase,
    row_name: str,
    strict: bool,
    first: int,
    template_kwargs: dict[str, object],
) -> Iterator[tuple[int, int, int]]:
    """Yield the index of each message to train on, and the start and end of its turn in the rendered conversation."""
    cursor = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        where = f"{row_name}: message {index}"
        counts = index >= first and is_trained(message, where)
        if strict and not counts:
            continue  # later turns are found by their prompts alone, and templates may write this one otherwise
        start = _turn_start(messages[:index], rendered, cursor, tokenizer, where, strict, template_kwargs)
        cursor = _turn_end(messages[: index + 1], rendered, start, tokenizer, where, template_kwargs)
        if counts:
            yield index, start, cursor


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the texts that the model wrote in a message, each with its field."""
    for field, value in message.items():
        if field == "content" or THOUGHTS.search(field):
            yield from ((field, text) for text in text_leaves(value) if text.strip())
    yield from (("tool_calls", call["function"]["name"]) for call in message.get("tool_calls") or ())


def text_leaves(value: object) -> Iterator[str]:
    """Yield the texts of a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from text_leaves(item)


def _lost_text(message: Message, turn: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the first text of a message that its turn lacks, with its field; spaces and tokens do not count."""
    written = _squeezed(turn)
    for field, text in _texts(message):
        if _squeezed(text) in written:
            continue
        # Templates write tokens such as <think> in their own way, or put them into the header of the turn.
        tokens = re.compile("|".join(map(re.escape, ["<think>", "</think>", *added_tokens(tokenizer)])))
        for piece in tokens.split(text):
            if _squeezed(piece) not in written:
                has_field = field in message and writes_field(tokenizer, "assistant", field)
                hint = "" if has_field else f" (it writes no {field}: put it into the content)"
                return f"{field} {piece.strip()!r:.80}{hint}"
    return ""


def _squeezed(text: str) -> str:
    return "".join(text.split())


def is_trained(message: Message, where: str) -> bool:
    """Return whether a message of the assistant is trained on: its :data:`SWITCHES` decide; by default it is.

    Raises:
        DataError: a switch has another value or spelling, or two of them differ.
    """
    switches = {key: value for key, value in message.items() if key in SWITCHES and value is not None}
    for key, value in switches.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f"{where}: {key} is {value!r:.80}. Expected 1 or true (trained on), or 0 or false (context); "
                "fractions are not supported."
            )
    for key in message:
        if key not in SWITCHES and key.lower().replace("_", "").replace("-", "") in OTHER_SPELLINGS:
            raise DataError(
                f"{where} has '{key}', which is not read. What is trained on is said by {', '.join(SWITCHES)}: 1 or 0. "
                "Rename it, or take it out."
            )
    if len(set(map(bool, switches.values()))) > 1:
        both = " and ".join(f"{key}={value}" for key, value in switches.items())
        raise DataError(f"{where}: {both} contradict each other. Keep one of them.")
    return all(switches.values())


def require_learnable(messages: list[Message], where: str) -> None:
    """Check that an assistant's turn is trained on, and that the first message, its prompt, is not the assistant's."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(f"{where}: no message has the role 'assistant', so there is nothing to learn (roles {roles}).")
    if roles[0] == "assistant":
        raise DataError(
            f"{where}: the conversation begins with the assistant, and a prompt cannot be empty. Put a message of "
            "the user or the system before it, or remove the row."
        )
    trained = [is_trained(message, f"{where}: message {index}") for index, message in enumerate(messages)]
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and any(message.get(key) for key in SWITCHES):
            raise DataError(
                f"{where}: message {index} has {', '.join(key for key in SWITCHES if message.get(key))}, and the role "
                f"{message['role']}. The loss is on what the assistant says: leave the key out, or set it to 0."
            )
    if not any(now for now, role in zip(trained, roles, strict=True) if role == "assistant"):
        raise DataError(
            f"{where}: no message of the assistant is trained on ({', '.join(SWITCHES)} are 0), so there is nothing "
            "to learn. Remove the row."
        )


def _turn_start(
    before: list[Message],
    rendered: str,
    cursor: int,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    strict: bool,
    kwargs: dict[str, object],
) -> int:
    prompt = render(before, tokenizer, where, add_generation_prompt=True, **kwargs)
    if rendered.startswith(prompt) and len(prompt) >= cursor:
        return len(prompt)
    if strict:
        common = common_prefix_length(rendered, prompt)
        raise DataError(
            f"{where}: the chat template renders the prompt of this turn differently from the whole conversation. "
            f"They differ at {prompt[common : common + 40]!r} and {rendered[common : common + 40]!r}. The model would "
            f"be trained on a context that it never sees. {REWRITTEN}"
        )
    context = render(before, tokenizer, where, **kwargs)
    header = prompt[len(context) :]
    # A template may put an empty thought into the header that it omits from finished turns: try the first line alone.
    positions = {text: rendered.find(text, cursor) for text in (header, header.split("\n")[0] + "\n") if text.strip()}
    places = [(at, -len(text)) for text, at in positions.items() if at >= 0]
    # The thought may start on the first line, right after the token that opens the turn.
    opening = max((token for token in added_tokens(tokenizer) if header.startswith(token)), key=len, default="")
    if not places and opening and (at := rendered.find(opening, cursor)) >= 0:
        return at + len(opening)
    if places:
        at, length = min(places)  # the earliest match; of two at one place the longer
        return at - length
    # A template without headers begins the turn after the token that ends the prompt, the same one of its kind.
    ending, position = _token_at_end(context.rstrip(), tokenizer), -1
    for _ in range(context.count(ending) if ending else 0):
        position = rendered.find(ending, position + 1)
        if position < 0:
            break
    if position >= cursor:
        return position + len(ending)
    raise DataError(
        f"{where}: the header {header!r} of this turn is not in the conversation as the template writes it."
    )


def _turn_end(
    through: list[Message],
    rendered: str,
    start: int,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    kwargs: dict[str, object],
) -> int:
    closed = render(through, tokenizer, where, **kwargs)
    forms = TemplateForms.from_tokenizer(tokenizer)
    if not forms.ends_turns:
        # Only an earlier turn may be written otherwise once later ones follow, so a token of the next message is there.
        positions = [
            position for token in forms.next_tokens if token and (position := rendered.find(token, start)) >= 0
        ]
        position = len(closed) if rendered.startswith(closed) else min(positions, default=len(rendered))
        return position + len(next((token for token in forms.next_tokens if rendered.startswith(token, position)), ""))
    stripped = closed.rstrip()
    mark = _token_at_end(stripped, tokenizer)
    if rendered.startswith(closed):
        return len(stripped) if mark else len(closed)
    turn = stripped.removesuffix(mark)
    if rendered.startswith(turn) and len(turn.rstrip()) > start:
        # The mark ends the conversation only: behind the turn's own mark (<|endoftext|>), or in its place (<|return|>).
        if _token_at_end(turn.rstrip(), tokenizer):
            return len(turn.rstrip())
        end_token = max(
            (token for token in added_tokens(tokenizer) if rendered.startswith(token, len(turn))), default=""
        )
        if end_token:
            return len(turn) + len(end_token)
    # Templates may render earlier turns differently once later ones follow (without thoughts), but keep the end mark.
    position = rendered.find(mark, start) if mark else -1
    if position < 0:
        raise DataError(f"{where}: the end of this turn is not in the conversation as the template writes it.")
    return position + len(mark)


def _token_at_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the longest added token with which a text ends; empty if none."""
    return max((token for token in added_tokens(tokenizer) if text.endswith(token)), key=len, default="")


def _tokens_of_prefix(text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase, where: str, strict: bool) -> int:
    """Return how many of ``ids`` belong to ``text``, a prefix of the conversation."""
    beginning = encode(text, tokenizer)
    if strict and ids[: len(beginning)] != beginning:
        first = common_prefix_length(ids, beginning)
        raise DataError(
            f"{where}: tokenizing the conversation up to this turn alone gives other tokens than tokenizing all of "
            f"it, from token {first} on: {tokenizer.convert_ids_to_tokens(beginning[first : first + 4])} and "
            f"{tokenizer.convert_ids_to_tokens(ids[first : first + 4])}. The usual cause is a turn that begins with a "
            "space or a newline; strip it, or set ignore_input_ids_mismatch=true to allow a token across the "
            "boundary."
        )
    return min(len(beginning), len(ids))
