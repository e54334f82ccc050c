"""From a model's path to its Transformers config, its causal language model, its weights and its end tokens."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from verl.errors import ConfigError
from verl.utils.model_code import LOADING_ERRORS, refuse_foreign_kernels, tell_if_code_runs, why_unreadable

logger = logging.getLogger(__name__)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
}
ATTN_IMPLEMENTATION = "attn_implementation"


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """``"bf16"``, ``"bfloat16"``, ``"fp32"`` ... as PyTorch knows them.

    Raises:
        ConfigError: the name is none of these.
    """
    if isinstance(name, torch.dtype):
        return name
    if name not in _DTYPES:
        raise ConfigError(f"dtype '{name}' is unknown. Use one of: {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def resolve_model_path(name_or_path: str) -> str:
    """A folder on this machine, with ``~`` expanded, or the name of a model on the Hugging Face hub.

    Raises:
        ConfigError: it is written as a folder, and there is no such folder.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return str(folder)
    written_as_folder = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if written_as_folder or folder.exists():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        siblings = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if folder.parent.is_dir() else []
        near = difflib.get_close_matches(folder.name, siblings, n=1)
        hint = f" Did you mean '{folder.parent / near[0]}'?" if near else ""
        raise ConfigError(
            f"model folder '{folder}' {what}.{hint} Give the folder that holds config.json, or a hub name "
            "such as 'Qwen/Qwen3-0.6B' (model.path)."
        )
    return name_or_path


def load_hf_config(
    name_or_path: str, overrides: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The Transformers config of a model folder or hub name.

    Args:
        name_or_path: ``model.hf_config_path`` if set, else ``model.path``.
        overrides: ``model.override_config``, fields to replace; a nested mapping goes into a nested config.
            ``attn_implementation`` chooses the attention kernel.
        trust_remote_code: run the Python files of the model folder.

    Raises:
        ConfigError: there is no config to read, it asks for code that nobody asked for, or an override names a field
            that the config lacks.
    """
    path = resolve_model_path(name_or_path)
    fields = dict(overrides or {})
    options = {key: fields.pop(key) for key in (ATTN_IMPLEMENTATION,) if key in fields}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"model config of '{path}' cannot be read: {why_unreadable(error, path)} A model folder holds config.json; "
            "a hub name needs network access, or the model in the local Hugging Face cache (model.path)."
        ) from error
    tell_if_code_runs(config, path)
    if ATTN_IMPLEMENTATION in options:
        config._attn_implementation = options[ATTN_IMPLEMENTATION]  # a private field of config.json would win
    else:
        refuse_foreign_kernels(config, path)
    _override(config, fields, "model.override_config")
    return config


def training_randomness(config: PretrainedConfig) -> dict[str, float]:
    """The settings that make the model's forward pass random in training: dropout, jitter or noise above 0."""
    fields = config.get_text_config().to_dict()
    words = ("drop", "jitter", "noise")
    return {
        name: float(value)
        for name, value in fields.items()
        if any(word in name for word in words) and isinstance(value, (int, float)) and value > 0
    }


def _override(config: PretrainedConfig, overrides: Mapping[str, Any], where: str) -> None:
    for key, value in overrides.items():
        if not hasattr(config, key):
            near = difflib.get_close_matches(key, list(config.to_dict()), n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"{where}.{key}: {type(config).__name__} has no such field.{hint}")
        inner = getattr(config, key)
        if isinstance(inner, PretrainedConfig):
            _override(inner, value, f"{where}.{key}")
        else:
            setattr(config, key, value)


def load_causal_lm(
    name_or_path: str, hf_config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The pretrained causal language model of a folder or hub name, on the CPU.

    Raises:
        ConfigError: it cannot be read, or the files lack some of its weights, which Transformers
            would fill with random numbers.
    """
    path = resolve_model_path(name_or_path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=hf_config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
        module, info = loaded
    except LOADING_ERRORS as error:
        raise ConfigError(f"model weights of '{path}' cannot be read: {why_unreadable(error, path)}") from error
    tell_if_code_runs(module, path)
    if info["missing_keys"]:
        raise ConfigError(
            f"the files of '{path}' lack {len(info['missing_keys'])} weights of {type(module).__name__}: "
            f"{_some(info['missing_keys'])}. Point model.path at the folder of a complete causal language model."
        )
    return module


def empty_causal_lm(
    hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal language model of ``hf_config`` on ``device`` with unset weights; nothing is read from disk."""
    with no_init_weights(), torch.device(device):
        module = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=trust_remote_code)
    module.tie_weights()
    return module.eval().requires_grad_(False)


def causal_lm_without_weights(
    hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal language model of ``hf_config`` with its buffers on ``device`` and parameters that take no memory.

    Parameters are on the meta device until they are replaced.
    """
    with no_init_weights(), _parameters_on_meta():
        module = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=trust_remote_code)
    module.tie_weights()
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return module.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register_parameter(module, name, parameter)

    register_parameter = nn.Module.register_parameter
    nn.Module.register_parameter = register  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register_parameter


def longrope_threshold(config: PretrainedConfig) -> int | None:
    """Tokens of the longest text in a pass beyond which Transformers rotates all its texts in another way, or None."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    rules = [parameters, *(rule for rule in parameters.values() if isinstance(rule, dict))]  # maybe by type of layer
    return min((r["original_max_position_embeddings"] for r in rules if r.get("rope_type") == "longrope"), default=None)


def eos_token_ids(name_or_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response, sorted: those of ``generation_config.json`` and the tokenizer's own.

    A chat model often has several (the end of a turn and the end of a text).

    Raises:
        ConfigError: there is none, so no response would ever end.
    """
    path = resolve_model_path(name_or_path)
    try:
        found = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the file is optional; without it the tokenizer alone says what ends a text
        found = None
    ids = {i for i in (*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id) if isinstance(i, int)}
    if not ids:
        raise ConfigError(
            f"neither the tokenizer nor the generation config of '{path}' names an end token, so no response would "
            "ever end. Set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json."
        )
    return tuple(sorted(ids))


def hf_config_of(model: Any) -> PretrainedConfig:
    """The Transformers config that a ``model`` section describes; see :func:`load_hf_config`."""
    return load_hf_config(model.hf_config_path or model.path, model.override_config, model.trust_remote_code)


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, hf_config: PretrainedConfig) -> None:
    """Refuse a tokenizer that makes ids for which the model has no embedding.

    A model with spare rows is fine: many vocabularies are padded to a round number. So is an added token that text
    does not turn into by itself, such as the place of an image in a model for text alone; it is a warning.

    Raises:
        ConfigError: a token of the vocabulary itself, or one that pads, begins, ends or writes a prompt, has an id
            that is not below ``hf_config.vocab_size``.
    """
    rows = hf_config.get_text_config().vocab_size
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= rows}
    if not beyond:
        return
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    template = str(tokenizer.chat_template or "")
    used = {str(token) for token in (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) if token}
    needed = {token for token in beyond if token not in added or token in used or token in template}
    token, largest = max(beyond.items(), key=lambda item: item[1])
    if needed:
        raise ConfigError(
            f"the tokenizer is larger than the model: token '{token}' has id {largest}, and the embedding has {rows} "
            "rows. Use the model's own tokenizer (model.tokenizer_path), or a model whose embedding was resized "
            f"to at least {largest + 1} rows."
        )
    logger.warning(
        "the model has no embedding for %d added token(s) of its tokenizer, such as '%s' (id %d; the embedding has %d "
        "rows). A prompt that holds one is refused.",
        len(beyond),
        token,
        largest,
        rows,
    )


def unknown_ids(tokenizer: PreTrainedTokenizerBase, hf_config: PretrainedConfig) -> list[int]:
    """Ids that the model can emit and the tokenizer does not know: rows that pad the embedding, and holes."""
    known = set(tokenizer.get_vocab().values())
    return [number for number in range(hf_config.get_text_config().vocab_size) if number not in known]


def _some(names: list[str] | set[str], shown: int = 5) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:shown]) + (f" and {len(ordered) - shown} more" if len(ordered) > shown else "")
