"""Chat templates and special tokens for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.datasets.chat import extract_system_prompt_and_generation
from verl.utils.tokenizer import normalize_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


def apply_chat_template(
    processor: Any,
    messages: Sequence[Mapping[str, object]],
    *,
    tokenize: bool = True,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    return_dict: bool = False,
    **kwargs: object,
) -> Any:
    """Render messages by the chat template of a tokenizer or processor.

    Returns:
        token ids; the text with ``tokenize=False``; what the tokenizer gives with ``return_dict=True``.
    """
    rendered = processor.apply_chat_template(
        list(messages),
        tokenize=tokenize,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        return_dict=return_dict,
        **kwargs,
    )
    return normalize_token_ids(rendered) if tokenize and not return_dict else rendered


def initialize_system_prompt(tokenizer: PreTrainedTokenizerBase, **apply_chat_template_kwargs: object) -> list[int]:
    """Return the tokens that a template puts before the first message, such as a system prompt of its own."""
    return extract_system_prompt_and_generation(tokenizer, **apply_chat_template_kwargs)[0]


def get_processor_token_id(processor: ProcessorMixin, token_name: str) -> int | None:
    """Return the id of a special token of a processor, such as ``image`` or ``video``; None if it has none.

    It is the processor's ``{token_name}_token_id``, or that of its text ``{token_name}_token``.
    """
    token_id = getattr(processor, f"{token_name}_token_id", None)
    if token_id is not None:
        return int(token_id)
    text = getattr(processor, f"{token_name}_token", None)
    return None if text is None else int(processor.tokenizer.convert_tokens_to_ids(text))


def set_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer without a padding token pad with its end token."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
