"""Load a tokenizer or a processor, and say what is wrong with it before a run starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import (
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from verl.errors import ConfigError
from verl.utils.model import resolve_model_path
from verl.utils.model_code import LOADING_ERRORS, tell_if_code_runs, why_unreadable

logger = logging.getLogger(__name__)

_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    chat_template: str | None = None,
    **kwargs: Any,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name, ready to pad.

    Args:
        name_or_path: model folder or hub name.
        correct_pad_token: give a tokenizer without pad token its end token as pad, and log that. Padding
            is told apart by masks alone, so the end token that a policy emits stays a token like any other.
        chat_template: Jinja text that replaces the tokenizer's own (``model.custom_chat_template``).
        kwargs: for ``AutoTokenizer.from_pretrained``, for example ``trust_remote_code=True``.

    Raises:
        ConfigError: the folder does not exist, holds no tokenizer, or there is nothing to pad with.
    """
    path = resolve_model_path(name_or_path)
    kwargs.setdefault("trust_remote_code", False)  # None would ask whoever sits at the terminal
    try:
        loader = PreTrainedTokenizerFast if _is_plain(path) else AutoTokenizer
        tokenizer = loader.from_pretrained(path, **kwargs)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"no tokenizer can be read from '{path}': {why_unreadable(error, path)} A tokenizer's folder holds "
            "tokenizer.json and tokenizer_config.json; if it lies apart from the model, set model.tokenizer_path."
        ) from error
    tell_if_code_runs(tokenizer, path)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.pad_token_id is None and correct_pad_token:
        _pad_with_eos(tokenizer, path)
    return tokenizer


def _is_plain(path: str) -> bool:
    """The folder says that its tokenizer.json is all there is to the tokenizer.

    AutoTokenizer does not believe that for some model types (qwen2 among them) and puts the family's own
    splitting rules in place of those in tokenizer.json, so that text becomes other tokens, without a word.
    """
    declared = get_tokenizer_config(path)
    return declared.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in declared


def _pad_with_eos(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of '{path}' has neither a pad token nor an end token, so a batch cannot be padded. "
            "Set pad_token and eos_token in its tokenizer_config.json."
        )
    tokenizer.pad_token = tokenizer.eos_token
    logger.warning(
        "the tokenizer of '%s' has no pad token: padding with its end token %r (id %d). Set pad_token in its "
        "tokenizer_config.json to choose another.",
        path,
        tokenizer.eos_token,
        tokenizer.eos_token_id,
    )


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that cannot turn messages into a prompt.

    Raises:
        ConfigError: it has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no chat template, so messages cannot be turned into a "
            "prompt. Give one as model.custom_chat_template='...', add chat_template to its tokenizer_config.json, "
            "or use the tokenizer of the model's chat or instruct variant (model.tokenizer_path)."
        )


def hf_processor(name_or_path: str, **kwargs: Any) -> ProcessorMixin | None:
    """The processor of a multi-modal model; None for a model of text alone.

    Raises:
        ConfigError: the folder does not exist, or its processor cannot be read.
    """
    path = resolve_model_path(name_or_path)
    kwargs.setdefault("trust_remote_code", False)
    files = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    if Path(path).is_dir() and not any((Path(path) / file).exists() for file in files):
        return None
    try:
        processor = AutoProcessor.from_pretrained(path, **kwargs)
    except LOADING_ERRORS as error:
        raise ConfigError(f"the processor of '{path}' cannot be read: {why_unreadable(error, path)}") from error
    tell_if_code_runs(processor, path)
    if isinstance(processor, ProcessorMixin):
        return processor
    if Path(path).is_dir():
        logger.warning("'%s' has files of a processor, but Transformers makes none of them: text alone is used.", path)
    return None
