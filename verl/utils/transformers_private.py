"""All uses of private interfaces of Transformers, behind named functions.

No other file of verl imports from a submodule of Transformers or reads an underscore attribute of its models and
configs. ``tests/utils/test_transformers_private.py`` fails on a version of Transformers that changed one of them;
``pyproject.toml`` limits the version.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.core_model_loading import (
    WeightConverter,
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import TRANSFORMERS_DYNAMIC_MODULE_NAME, custom_object_save
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, LoadStateDictConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from transformers.utils import logging as transformers_logging
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    _compile_jinja_template,
    get_json_schema,
)

# Transformers 5.19, which vLLM pins, hands messages to a template without other names of their reasoning.
_alias_reasoning_fields = getattr(chat_template_utils, "_alias_reasoning_fields", list)

try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as GGUF_SPLITS
except ImportError:  # earlier versions split the text of every GGUF file alike
    GGUF_SPLITS: dict[str, str] = {}

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "GGUF_SPLITS",
    "DynamicLayer",
    "GenericForSequenceClassification",
    "GenericForTokenClassification",
    "get_json_schema",
    "get_tokenizer_config",
    "no_init_weights",
]

UNDESCRIBED = (DocstringParsingException, TypeHintParsingException)
"""Errors of ``get_json_schema`` about a function whose annotations or docstring lack something."""


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Let Transformers show no bars inside the context."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def without_load_report() -> Iterator[None]:
    """Drop the table that Transformers logs about weights that are missing or left over; log it if the block raises."""
    held: list[logging.LogRecord] = []
    log = logging.getLogger("transformers.modeling_utils")

    def hold(record: logging.LogRecord) -> bool:
        if "LOAD REPORT" not in record.getMessage():
            return True
        held.append(record)
        return False

    has_loaded = False
    log.addFilter(hold)
    try:
        yield
        has_loaded = True
    finally:
        log.removeFilter(hold)
        for record in () if has_loaded else held:
            log.handle(record)


def attention_of(config: PretrainedConfig) -> str | None:
    """Return the attention implementation in a config; None leaves the choice to the model."""
    return config._attn_implementation


def use_attention(module: PreTrainedModel, name: str | None) -> None:
    """Switch the language model to another attention; a vision tower keeps its own."""
    text = module.config.get_text_config()
    section = next((part for part in module.config.sub_configs if getattr(module.config, part) is text), None)
    module.set_attn_implementation(name if section is None else {section: name})  # pyright: ignore[reportArgumentType]


def experts_of(config: PretrainedConfig) -> str | None:
    """Return what computes the experts of a model that was made from a config, such as ``grouped_mm``."""
    return config.get_text_config()._experts_implementation


def use_some_experts(module: nn.Module, count: int) -> None:
    """Let a module of experts compute with ``count`` of them; chosen experts from that index on are none."""
    module.num_experts = count  # pyright: ignore[reportArgumentType]
    module._is_expert_parallel = True  # pyright: ignore[reportArgumentType]


def set_attention(config: PretrainedConfig, name: str) -> None:
    """Set the attention implementation, overriding the one in ``config.json``."""
    config._attn_implementation = name


def takes_any_attention(module: PreTrainedModel) -> bool:
    """Return whether the model calls attention through ``ALL_ATTENTION_FUNCTIONS``, so that it can be replaced."""
    return bool(getattr(module, "_supports_attention_backend", False))


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Compute the gated delta rule (arXiv:2412.06464) in chunks, by the kernel that Transformers takes on this device.

    Args:
        query: (rows, length, heads, key numbers); queries and keys are normalised here.
        key: same shape.
        value: (rows, length, heads, value numbers).
        decay: (rows, length, heads) logarithm of what is left of the state, at most 0.
        strength: (rows, length, heads) from 0 to 1, how much of the value for a key is replaced.

    Returns:
        (rows, length, heads, value numbers)
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    output, _ = torch_chunk_gated_delta_rule(query, key, value, g=decay, beta=strength, use_qk_l2norm_in_kernel=True)
    return output


def keeps_state(module: PreTrainedModel) -> bool:
    """Return whether Transformers marks the model as one whose layers carry a state from token to token."""
    return bool(getattr(module, "_is_stateful", False))


def layer_class_names(module: PreTrainedModel) -> set[str]:
    """Return the class names of the repeated layers."""
    return set(getattr(module, "_no_split_modules", None) or ())


def forget_ties(module: PreTrainedModel) -> None:
    """Mark all weights of the model as untied, so that each is saved."""
    module.all_tied_weights_keys = {}


def is_from_model_folder(module_name: str) -> bool:
    """Return whether a Python module was loaded from a model's folder (``trust_remote_code``)."""
    return module_name.split(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME


def sequence_classifier_of(model_type: str) -> str | None:
    """Return the class name of the sequence classifier for a model type; None if Transformers has none."""
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)


def token_classifier_of(model_type: str) -> str | None:
    """Return the class name of the token classifier for a model type; None if Transformers has none."""
    return MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(model_type)


def checkpoint_layers(module: PreTrainedModel) -> None:
    """Keep only each layer's input for the backward pass, in a part of a model that reads no token ids.

    ``activation_checkpointing_enable`` would warn that such a part has no embedding.
    """
    again = partial(checkpoint, use_reentrant=False)
    module._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=again)


def kept_in_fp32(hf: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Return what the names of weights match that Transformers loads in fp32 where the model has ``dtype``."""
    parts = hf._get_dtype_plan(dtype)
    return re.compile("|".join(rf"(^|\.){part}(\.|$)" for part in parts) if parts else r"(?!)")


def names_on_disk(module: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return whole weights under the names (and in the shapes) that the model's files have."""
    in_files = revert_weight_conversion(module, weights)
    if module.config.model_type != "qwen3_vl_moe":
        return in_files
    # Its files have the matrices of experts transposed, as engines expect them; Transformers reads both, and writes
    # them as they are in memory.
    return {
        name: tensor.transpose(1, 2).contiguous()
        if ".mlp.experts." in name and name in weights and tensor.shape == weights[name].shape
        else tensor
        for name, tensor in in_files.items()
    }


def conversions_of(module: PreTrainedModel) -> list[Any] | None:
    """Return what turned the names and shapes of the files into those of the model; None if no files were read."""
    return getattr(module, "_weight_conversions", None)


def set_conversions(module: PreTrainedModel, conversions: Any) -> None:
    """Let :func:`names_on_disk` revert the result of :func:`conversions_of` for the same model, read elsewhere."""
    module._weight_conversions = conversions


def joins_weights(module: PreTrainedModel) -> bool:
    """Return whether loading the model's files merged several weights into one, or split one into several."""
    return any(isinstance(conversion, WeightConverter) for conversion in conversions_of(module) or ())


def converted(module: PreTrainedModel, in_files: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return some weights as the model has them; it stays without them.

    Args:
        module: a model on the meta device, into which Transformers has read the same files, without data.
        in_files: tensors, or slices of safetensors, by their names in the files; of a weight that is made of several,
            all of them.
        dtype: number format to convert into, except what the model keeps in fp32.
    """
    settings = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=module._get_dtype_plan(dtype),
        weight_mapping=conversions_of(module),
        ignore_mismatched_sizes=True,
    )
    with without_progress_bars():
        convert_and_load_state_dict_in_model(module, dict(in_files), settings)
    weights: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        here = {**part._parameters, **part._buffers}
        for name, tensor in here.items():
            if tensor is None or tensor.is_meta:
                continue
            weights[f"{prefix}.{name}" if prefix else name] = tensor.detach()
            empty = tensor.detach().to("meta")
            setattr(part, name, nn.Parameter(empty, requires_grad=False) if name in part._parameters else empty)
    return weights


def from_config(kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Create a model of the class ``kind``, which shares ``config`` and computes experts as its own code says."""
    return kind._from_config(config, dtype=dtype, experts_implementation="eager")


def write_model_code(module: PreTrainedModel, folder: Path, config: PretrainedConfig) -> None:
    """Copy the Python files of a model that came with its folder, and name them in ``config``."""
    if module.is_remote_code():
        custom_object_save(module, folder, config=config)  # pyright: ignore[reportArgumentType]


# ---- tokenizers

_READ_BY_TRANSFORMERS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""Variables of a template with a meaning of their own, among them all that change more than the rendering."""


def json_renderer(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, object]
) -> Callable[[list[Any], Any, bool], str] | None:
    """Return ``apply_chat_template`` for messages and tools that are nothing but values of JSON.

    Transformers rebuilds all that a template sees, as other objects could let it do harm; that takes several times as
    long as the rendering.

    Args:
        tokenizer: with a chat template.
        variables: further variables of the template.

    Returns:
        A function of messages, tools (or None) and ``add_generation_prompt``; it raises what the template raises. None
        if the tokenizer renders by code of its own or has several templates, or the variables are of another kind.
    """
    is_own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    if is_own or not isinstance(tokenizer.chat_template, str) or _READ_BY_TRANSFORMERS & variables.keys():
        return None
    seen = {**tokenizer.special_tokens_map, **variables}
    try:
        plain = json.loads(json.dumps(seen))
    except (TypeError, ValueError):
        return None
    if plain != seen:
        return None
    template = _compile_jinja_template(tokenizer.chat_template)

    def rendered(messages: list[Any], tools: object, add_generation_prompt: bool) -> str:
        without_none = [{key: value for key, value in message.items() if value is not None} for message in messages]
        chat = _alias_reasoning_fields(without_none)
        return template.render(
            messages=chat, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **plain
        )

    return rendered


def decoded(tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
    """Return ``tokenizer.decode`` of a list of integers, without its look at each of them for tensors and arrays."""
    if type(tokenizer).decode is not PreTrainedTokenizerBase.decode:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return tokenizer._decode(token_ids, skip_special_tokens=skip_special_tokens)
