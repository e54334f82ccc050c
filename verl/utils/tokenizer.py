"""Load and check tokenizers and multi-modal processors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from verl.errors import ConfigError, DataError
from verl.utils.model import require_on_hub, resolve_model_path
from verl.utils.model_code import LOADING_ERRORS, warn_if_code_runs, why_unreadable
from verl.utils.model_facts.model_files import read_chat_template, tokenizer_problem
from verl.utils.transformers_private import get_tokenizer_config
from verl.vision.processor import load_processor

if TYPE_CHECKING:
    from verl.config import HFModelConfig

logger = logging.getLogger(__name__)

_REMEDY = (
    "A tokenizer's folder holds tokenizer.json and tokenizer_config.json; if it lies apart from the model, set "
    "tokenizer_path."
)
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


def tokenizer_of(model: HFModelConfig, correct_pad_token: bool = True) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a ``model`` section of the configuration, with its chat template; see :func:`hf_tokenizer`.

    All code that prompts a model, or writes one, loads it here.
    """
    return hf_tokenizer(
        model.tokenizer_path or model.path,
        correct_pad_token,
        chat_template=model.custom_chat_template,
        trust_remote_code=model.trust_remote_code,
    )


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    chat_template: str | None = None,
    **kwargs: Any,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name.

    Args:
        name_or_path: model folder or hub name.
        correct_pad_token: use the end token for padding if there is no pad token, with a warning. Padding is
            recognised by masks only, so end tokens in responses are not affected.
        correct_gemma2: no effect: the end of a turn is one of the model's end tokens (:func:`eos_token_ids`) here.
        chat_template: replaces the tokenizer's own; Jinja text or a file with it (``model.custom_chat_template``).
        kwargs: for ``AutoTokenizer.from_pretrained``, for example ``trust_remote_code=True``.

    Raises:
        ConfigError: the folder does not exist or holds no tokenizer, there is neither a pad nor an end token, or
            ``chat_template`` is no template.
    """
    path = resolve_model_path(name_or_path)
    kwargs.setdefault("trust_remote_code", False)  # None would prompt on the terminal
    if not Path(path).is_dir():
        require_on_hub(path)
    elif problem := tokenizer_problem(Path(path)):
        raise ConfigError(f"no tokenizer can be read from '{path}': {problem}. {_REMEDY}")
    try:
        loader = PreTrainedTokenizerFast if _is_plain(path) else AutoTokenizer
        tokenizer = loader.from_pretrained(path, **kwargs)
    except LOADING_ERRORS as error:
        raise ConfigError(f"no tokenizer can be read from '{path}': {why_unreadable(error, path)} {_REMEDY}") from error
    warn_if_code_runs(tokenizer, path)
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    if tokenizer.pad_token_id is None and correct_pad_token:
        _pad_with_eos(tokenizer, path)
    return tokenizer


def _is_plain(path: str) -> bool:
    """Return whether tokenizer.json defines the tokenizer completely, according to tokenizer_config.json."""
    # For some model types, e.g. qwen2, AutoTokenizer ignores that and silently replaces the splitting rules of
    # tokenizer.json by those of the model family, so that text is split into different tokens.
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


def hf_processor(name_or_path: str, **kwargs: object) -> ProcessorMixin | None:
    """Load the processor of a multi-modal model; return None for a text model.

    Images and frames of videos of the families of :mod:`verl.vision.families` are prepared by Pillow, whatever else is
    installed. Their processors lack Transformers' own part for videos where torchvision is not installed.
    """
    path = resolve_model_path(name_or_path)
    kwargs.setdefault("trust_remote_code", False)
    files = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    if Path(path).is_dir() and not any((Path(path) / file).exists() for file in files):
        return None
    try:
        processor = load_processor(
            path, lambda: hf_tokenizer(path, trust_remote_code=kwargs["trust_remote_code"]), **kwargs
        )
    except LOADING_ERRORS as error:
        raise ConfigError(f"the processor of '{path}' cannot be read: {why_unreadable(error, path)}") from error
    if processor is not None:
        warn_if_code_runs(processor, path)
    elif Path(path).is_dir():
        logger.warning("'%s' has files of a processor, but Transformers makes none of them: text alone is used.", path)
    return processor


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """Return the ids of one text as a list, from whatever a tokenizer or ``apply_chat_template`` returns.

    That is a list, a tensor or an array, also with a batch dimension of one, or a mapping with ``input_ids``.

    Raises:
        DataError: it holds several texts, or something other than ids.
    """
    ids = tokenized_output
    if isinstance(ids, Mapping) or hasattr(ids, "input_ids"):
        ids = ids["input_ids"] if isinstance(ids, Mapping) else ids.input_ids
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = list(ids[0])
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise DataError(f"the ids of one text are a list of integers, got {ids!r:.120}.")
    return [int(token) for token in ids]
