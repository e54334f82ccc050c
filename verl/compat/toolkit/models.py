"""Models of Transformers for scripts: classes, sizes, adapters, random masks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from verl.errors import DataError, SchemaError
from verl.utils.model import load_hf_config, update_model_config


class LambdaLayer(nn.Module):
    """A module that applies a function."""

    def __init__(self, fn: Callable[..., object]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the function."""
        return self.fn(*args, **kwargs)


def squeeze(x: Tensor) -> Tensor:
    """Remove the last dimension, which has one entry: (bsz, length, 1) to (bsz, length)."""
    return x.squeeze(dim=-1)


def get_huggingface_actor_config(
    model_name: str, override_config_kwargs: Mapping[str, object] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Return the config of a model with some entries changed."""
    config = load_hf_config(model_name, trust_remote_code=trust_remote_code)
    update_model_config(config, override_config_kwargs or {})
    return config


def create_huggingface_actor(
    model_name: str,
    override_config_kwargs: Mapping[str, object] | None = None,
    automodel_kwargs: Mapping[str, object] | None = None,
) -> PreTrainedModel:
    """Make a causal language model with random weights.

    Args:
        model_name: a folder or the name of a model, of which the config is taken.
        override_config_kwargs: changed entries of the config.
        automodel_kwargs: arguments of ``AutoModelForCausalLM.from_config``.
    """
    config = get_huggingface_actor_config(model_name, override_config_kwargs)
    return transformers.AutoModelForCausalLM.from_config(config, **(automodel_kwargs or {}))


def get_auto_model_for_vision2seq() -> type:
    """Return the Auto class of models that read images and write text."""
    return transformers.AutoModelForImageTextToText


def get_hf_auto_model_class(hf_config: PretrainedConfig) -> type:
    """Return the Auto class that makes the generating model of a config."""
    if type(hf_config) in transformers.AutoModelForImageTextToText._model_mapping:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """Count the parameters of a module.

    Args:
        model: the module.
        scale: unit of the count: ``B`` (1e9), ``M``, ``K``, ``""``, or ``auto``, the largest of which there is one.

    Returns:
        the count and its unit.

    Raises:
        ValueError: there is no such unit.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    units = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
    if scale == "auto":
        scale = next((unit for unit, size in units.items() if count > size), "")
    if scale not in units:
        raise ValueError(f"scale={scale!r} is no unit. Use B, M, K, an empty text, or auto.")
    return count / units[scale], scale


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """Draw an attention mask of padding on the left, tokens and padding on the right for each row.

    Args:
        input_ids: (bsz, length); only its shape and device matter.
        max_ratio_of_valid_token: most tokens of a row, as a fraction of the length.
        max_ratio_of_left_padding: most padding on the left, as a fraction of the length.
        min_ratio_of_valid_token: fewest tokens of a row, as a fraction of the length.

    Returns:
        (bsz, length) int64; each row has at least one token.

    Raises:
        SchemaError: the fractions are not in order, or leave no room for the fewest tokens.
    """
    length = input_ids.shape[-1]
    if not 0 <= min_ratio_of_valid_token <= max_ratio_of_valid_token <= 1 or not max_ratio_of_valid_token > 0:
        raise SchemaError(
            f"min_ratio_of_valid_token={min_ratio_of_valid_token} and max_ratio_of_valid_token="
            f"{max_ratio_of_valid_token} must be fractions, the first not above the second, which is positive."
        )
    if not 0 <= max_ratio_of_left_padding < 1 or min_ratio_of_valid_token + max_ratio_of_left_padding > 1:
        raise SchemaError(
            f"max_ratio_of_left_padding={max_ratio_of_left_padding} leaves no room for min_ratio_of_valid_token="
            f"{min_ratio_of_valid_token} of a row."
        )
    left_most = int(length * max_ratio_of_left_padding)
    fewest = max(1, int(length * min_ratio_of_valid_token))
    most = max(fewest, int(length * max_ratio_of_valid_token))
    mask = torch.zeros_like(input_ids, dtype=torch.int64)
    for row in mask:
        left = int(torch.randint(0, min(left_most, length - fewest) + 1, ()))
        count = int(torch.randint(fewest, min(most, length - left) + 1, ()))
        row[left : left + count] = 1
    return mask


def pad_packed_inputs(
    unpad_tokens: Tensor, cu_seqlens: Tensor | None, max_seqlen_in_batch: int, size: int
) -> tuple[Tensor, Tensor | None, int]:
    """Pad packed tokens to a multiple of ``size`` by one more sequence of zeros.

    Args:
        unpad_tokens: (tokens, ...).
        cu_seqlens: (sequences + 1,) ends of the sequences, or None.
        max_seqlen_in_batch: length of the longest sequence.
        size: what the number of tokens shall be a multiple of.

    Returns:
        the three, changed; as they are if nothing is missing.
    """
    missing = -len(unpad_tokens) % size
    if not missing:
        return unpad_tokens, cu_seqlens, max_seqlen_in_batch
    padding = unpad_tokens.new_zeros(missing, *unpad_tokens.shape[1:])
    if cu_seqlens is not None:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + missing])
    return torch.cat([unpad_tokens, padding]), cu_seqlens, max(max_seqlen_in_batch, missing)


def get_lora_rank_from_adapter(adapter_path: str | os.PathLike[str]) -> int:
    """Read the rank of an adapter that peft has written.

    Raises:
        DataError: the folder has no adapter, or its file names no rank.
    """
    path = Path(adapter_path) / "adapter_config.json"
    try:
        return int(json.loads(path.read_text())["r"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} names no rank 'r': {error!r}. It is written by peft's save_pretrained.") from error


def check_target_modules(config: object, key: str) -> bool:
    """Return whether ``target_modules`` of an adapter (a pattern, or names or their last parts) names ``key``."""
    return _is_named(getattr(config, "target_modules", None), key)


def check_exclude_modules(config: object, key: str) -> bool:
    """Return whether an adapter's ``exclude_modules`` names the module ``key``, as for :func:`check_target_modules`."""
    return _is_named(getattr(config, "exclude_modules", None), key)


def _is_named(modules: str | Iterable[str] | None, key: str) -> bool:
    if not modules:
        return False
    if isinstance(modules, str):
        return re.fullmatch(modules, key) is not None
    return any(key == name or key.endswith(f".{name}") for name in modules)
