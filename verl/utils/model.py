"""Load a model's Transformers config, its causal language model and its end tokens, and check its tokenizer."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import httpx2
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
)
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from verl.errors import ConfigError
from verl.utils.console import parameters_in_words, show
from verl.utils.gguf import converted_gguf
from verl.utils.model_code import LOADING_ERRORS, refuse_foreign_kernels, warn_if_code_runs, why_unreadable
from verl.utils.model_facts.config_fields import dropout_rates, random_fields, rope_rules, rope_type
from verl.utils.model_facts.experts import ExpertSizes
from verl.utils.model_facts.model_files import DEQUANTIZE, GGUF, quantized_by
from verl.utils.torch_functional import all_finite
from verl.utils.transformers_private import names_on_disk, no_init_weights, set_attention, without_load_report
from verl.vision.families import FAMILIES

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
    """Convert ``"bf16"``, ``"bfloat16"``, ``"fp32"`` ... to a PyTorch dtype."""
    if isinstance(name, torch.dtype):
        return name
    if name not in _DTYPES:
        raise ConfigError(f"dtype '{name}' is unknown. Use one of: {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def resolve_model_path(name_or_path: str) -> str:
    """Return an existing local folder with ``~`` expanded, or the unchanged name of a model on the Hugging Face hub.

    A GGUF file is converted into a folder, once.
    """
    folder = Path(name_or_path).expanduser()
    if folder.suffix == GGUF:
        return converted_gguf(folder)
    if folder.is_dir():
        return str(folder)
    written_as_folder = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if written_as_folder or folder.exists():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        siblings = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if folder.parent.is_dir() else []
        near = difflib.get_close_matches(folder.name, siblings, n=1)
        hint = f" Did you mean '{folder.parent / near[0]}'?" if near else ""
        raise ConfigError(
            f"model folder '{folder}' {what}.{hint} Give the folder that holds config.json, a .gguf file, or a "
            "hub name such as 'Qwen/Qwen3-0.6B'."
        )
    return name_or_path


@functools.cache
def require_on_hub(name: str) -> None:
    """Refuse a name that is neither in the local Hugging Face cache nor on a hub that answers.

    Transformers tries each file of an unreachable hub for half a minute.

    Raises:
        ConfigError: there is no such model, or the hub cannot be reached.
    """
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "tokenizer_config.json")):
        return
    advice = "Give the folder of a model on this machine, or a name such as 'Qwen/Qwen3-0.6B'."
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
    except (EntryNotFoundError, GatedRepoError):
        return  # the model exists; reading its files says what is missing, or that a login is
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"there is no model folder '{name}', and the hub has no model of that name. {advice}"
        ) from error
    except (OSError, httpx2.TransportError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"there is no model folder '{name}', the local Hugging Face cache does not have it, and the hub "
            f"cannot be asked ({why}). {advice}"
        ) from error


def load_hf_config(
    name_or_path: str, overrides: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Load the Transformers config of a model folder or hub name.

    Args:
        name_or_path: ``model.hf_config_path`` if set, else ``model.path``.
        overrides: fields to replace (``model.override_config``); a nested mapping changes a nested config.
            ``attn_implementation`` selects the attention kernel.
        trust_remote_code: run the Python files of the model folder.

    Raises:
        ConfigError: the config cannot be read, needs Python code or kernels that were not allowed, or lacks a field
            that is overridden.
    """
    path = resolve_model_path(name_or_path)
    if not Path(path).is_dir():
        require_on_hub(path)
    fields = dict(overrides or {})
    options = {key: fields.pop(key) for key in (ATTN_IMPLEMENTATION,) if key in fields}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"model config of '{path}' cannot be read: {why_unreadable(error, path)} A model folder holds config.json; "
            "a hub name needs network access, or the model in the local Hugging Face cache."
        ) from error
    if method := quantized_by(getattr(config, "quantization_config", None)):  # of the hub, for example
        raise ConfigError(f"model '{path}': {method}. {DEQUANTIZE[0].upper()}{DEQUANTIZE[1:]}.")
    warn_if_code_runs(config, path)
    if ATTN_IMPLEMENTATION in options:
        set_attention(config, options[ATTN_IMPLEMENTATION])  # a private field in config.json would take precedence
    else:
        refuse_foreign_kernels(config, path)
    update_model_config(config, fields, "model.override_config")
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        # Training reads routers itself, and the loss that Transformers then adds fails with cached keys.
        text.output_router_logits = False
    return config


def training_randomness(config: PretrainedConfig) -> dict[str, float]:
    """Return the config fields that make the forward pass random in training: dropout, jitter or noise above 0."""
    return random_fields(config.get_text_config().to_dict())


def switch_off_dropout(config: PretrainedConfig, overrides: Mapping[str, Any]) -> dict[str, float]:
    """Set the rates of dropout to 0 in place, but for those that ``overrides`` names, and return them as they were.

    Log-probs of an update are to be those of the policy that sampled: its first ratios are 1.
    """
    rates = {path: rate for path, rate in dropout_rates(config.to_dict()).items() if not _names(overrides, path)}
    set_dropout(config, dict.fromkeys(rates, 0.0))
    return rates


def set_dropout(config: PretrainedConfig, rates: Mapping[str, float]) -> None:
    """Set rates of dropout in place, by names of fields, which are dotted in nested configs."""
    for path, rate in rates.items():
        *parts, name = path.split(".")
        setattr(functools.reduce(getattr, parts, config), name, rate)


def _names(overrides: Mapping[str, Any], path: str) -> bool:
    """Return whether nested ``overrides`` have an entry at the dotted ``path``."""
    name, _, inner = path.partition(".")
    return name in overrides and (not inner or _names(overrides[name], inner))


def update_model_config(
    module_config: PretrainedConfig, override_config_kwargs: Mapping[str, Any], where: str = "override_config"
) -> None:
    """Replace fields of a Transformers config in place; a nested mapping changes a nested config.

    Raises:
        ConfigError: the config lacks a field; ids of tokens (``pad_token_id`` ...) may be new.
    """
    config = module_config
    for key, value in override_config_kwargs.items():
        if not hasattr(config, key) and not key.endswith("_token_id"):
            near = difflib.get_close_matches(key, list(config.to_dict()), n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"{where}.{key}: {type(config).__name__} has no such field.{hint}")
        inner = getattr(config, key, None)
        if isinstance(inner, PretrainedConfig):
            update_model_config(inner, value, f"{where}.{key}")
        else:
            setattr(config, key, value)


def load_causal_lm(
    name_or_path: str, hf_config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the pretrained causal language model of a folder or hub name, also one with images, on the CPU.

    Raises:
        ConfigError: it cannot be read, or files lack some of its weights, which Transformers would initialise randomly.
    """
    return load_pretrained(auto_of(hf_config), name_or_path, hf_config, dtype, trust_remote_code)


def weights_folder(name_or_path: str) -> Path:
    """Return the folder with the safetensors of a model folder or hub name; from the hub they are downloaded."""
    resolved = resolve_model_path(name_or_path)
    is_local = Path(resolved).is_dir()
    return Path(resolved if is_local else snapshot_download(resolved, allow_patterns=["model*.safetensors*"]))


def auto_of(hf_config: PretrainedConfig) -> Any:
    """Return the ``Auto...`` class of Transformers for the language model of a config, also one with images."""
    return AutoModelForImageTextToText if hf_config.model_type in FAMILIES else AutoModelForCausalLM


def load_pretrained(
    auto: Any,
    name_or_path: str,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    new: Set[str] = frozenset(),
) -> PreTrainedModel:
    """Load a model by an ``Auto...`` class of Transformers, on the CPU; its files may lack the weights ``new``.

    Raises:
        ConfigError: the files cannot be read, lack weights, or hold weights of another shape or that are not finite.
    """
    path = resolve_model_path(name_or_path)
    try:
        with without_load_report():
            module, info = auto.from_pretrained(
                path,
                config=hf_config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, with their names
            )
    except LOADING_ERRORS as error:
        raise ConfigError(f"model weights of '{path}' cannot be read: {why_unreadable(error, path)}") from error
    warn_if_code_runs(module, path)
    check_loaded(module, info, path, new)
    check_finite(module.named_parameters(), path)
    return module


def check_loaded(module: PreTrainedModel, info: Mapping[str, Set[Any]], path: str, new: Set[str] = frozenset()) -> None:
    """Check what Transformers says of the files of a model; they may lack the weights ``new``.

    Raises:
        ConfigError: the files lack weights, or hold some of another shape.
    """
    kind = type(module).__name__
    if other := sorted(info["mismatched_keys"]):
        name, shape, needed = other[0]
        raise ConfigError(
            f"the files of '{path}' hold {len(other)} weights of other shapes than {kind} of this configuration has: "
            f"{name} has {list(shape)}, and {list(needed)} is needed. Take config.json and weights of the same model."
        )
    if absent := set(info["missing_keys"]) - new:
        raise ConfigError(
            f"the files of '{path}' do not contain {len(absent)} weights of {kind}: {_some(absent)}. Name the "
            "folder of a complete model of this kind."
        )
    if not new and (unused := info["unexpected_keys"]):
        logger.warning("'%s' holds %d weights that %s does not use: %s", path, len(unused), kind, _some(unused))


def check_finite(weights: Iterable[tuple[str, Tensor]], path: str) -> None:
    """Refuse weights that are NaN or infinite, before a model runs with them.

    Raises:
        ConfigError: the message names them.
    """
    bad = {name: weight for name, weight in weights if not all_finite(weight.detach())}
    if bad:
        counts = {name: int((~weight.isfinite()).sum()) for name, weight in bad.items()}
        examples = [f"{name} ({count} of {bad[name].numel()} values)" for name, count in counts.items()]
        raise ConfigError(
            f"the weights in '{path}' are not finite (nan or infinite): {_some(examples)}. The training that "
            "wrote them diverged, or a conversion overflowed: take an earlier checkpoint, or download or convert the "
            "model again."
        )


def empty_causal_lm(
    hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Create the causal language model of ``hf_config`` on ``device`` with uninitialised, frozen weights."""
    with no_init_weights(), torch.device(device):
        module = auto_of(hf_config).from_config(hf_config, dtype=dtype, trust_remote_code=trust_remote_code)
    module.tie_weights()
    return module.eval().requires_grad_(False)


def causal_lm_without_weights(
    hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Create the causal language model of ``hf_config`` with buffers on ``device`` and meta parameters."""
    # Unset parameters take no physical memory on the CPU, because their pages are never written.
    module = empty_causal_lm(hf_config, dtype, torch.device("cpu"), trust_remote_code)
    weightless: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in weightless:
                weightless[parameter] = nn.Parameter(parameter.to("meta"), requires_grad=False)
            part.register_parameter(name, weightless[parameter])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return module


def longrope_threshold(config: PretrainedConfig) -> int | None:
    """Length beyond which one sequence makes Transformers use LongRoPE's long factors for its whole pass, or None."""
    rules = [rule for rule in rope_rules(config.get_text_config().to_dict()) if rope_type(rule) == "longrope"]
    return min((rule["original_max_position_embeddings"] for rule in rules), default=None)


def rope_types(config: PretrainedConfig) -> set[str]:
    """Return the types of the model's rotary embeddings, such as ``default`` or ``yarn``."""
    return {kind for rule in rope_rules(config.get_text_config().to_dict()) if (kind := rope_type(rule))}


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """Read ``generation_config.json`` of a model folder or hub name; None if there is none, as the file is optional.

    ``trust_remote_code`` makes no difference, because the file holds no code.
    """
    try:
        return GenerationConfig.from_pretrained(resolve_model_path(model))
    except OSError:
        return None


def eos_token_ids(name_or_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return all tokens that end a response, sorted: those of ``generation_config.json`` and the tokenizer's.

    A chat model often has several (end of turn and end of text). None at all is an error.
    """
    path = resolve_model_path(name_or_path)
    config = get_generation_config(path)
    configured = None if config is None else config.eos_token_id
    ids = {
        i
        for i in (*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id)
        if isinstance(i, int)
    }
    if not ids:
        raise ConfigError(
            f"neither the tokenizer nor the generation config of '{path}' names an end token, so no response would "
            "ever end. Set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json."
        )
    return tuple(sorted(ids))


def hf_config_of(model: Any) -> PretrainedConfig:
    """Load the Transformers config of a ``model`` section of the configuration; see :func:`load_hf_config`."""
    return load_hf_config(model.hf_config_path or model.path, model.override_config, model.trust_remote_code)


def has_experts(hf_config: PretrainedConfig) -> bool:
    """Return whether a config is that of a mixture of experts."""
    return ExpertSizes.from_config(hf_config.get_text_config()) is not None


def check_has_experts(hf_config: PretrainedConfig, key: str) -> None:
    """Raise ConfigError if the model has no experts, of which the setting ``key`` tells something."""
    if not has_experts(hf_config):
        raise ConfigError(f"{key}=true: {hf_config.model_type} has no experts. Set it false, or use another model.")


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, hf_config: PretrainedConfig, warns: bool = True) -> None:
    """Refuse a tokenizer that produces ids for which the model has no embedding.

    An embedding larger than the vocabulary is allowed, as many are padded to a round number. An added token without
    an embedding, such as an image placeholder in a text model, only causes a warning, unless ``warns`` is False.

    Raises:
        ConfigError: a token of the vocabulary, a pad, bos or eos token, or one in the chat template has an id that is
            not below ``hf_config.vocab_size``.
    """
    rows = hf_config.get_text_config().vocab_size
    beyond = {token: token_id for token, token_id in tokenizer.get_vocab().items() if token_id >= rows}
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
            "rows. Use the model's own tokenizer (tokenizer_path), or a model whose embedding was resized "
            f"to at least {largest + 1} rows."
        )
    if not warns:
        return
    logger.warning(
        "the model has no embedding for %d added token(s) of its tokenizer, such as '%s' (id %d; the embedding has %d "
        "rows). A prompt that holds one is refused.",
        len(beyond),
        token,
        largest,
        rows,
    )


def unknown_ids(tokenizer: PreTrainedTokenizerBase, hf_config: PretrainedConfig) -> list[int]:
    """Return ids that the model can sample but the tokenizer lacks: padding of the embedding, and gaps."""
    vocabulary = set(tokenizer.get_vocab().values())
    return [token_id for token_id in range(hf_config.get_text_config().vocab_size) if token_id not in vocabulary]


def _some(names: Iterable[str], shown: int = 5) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:shown]) + (f" and {len(ordered) - shown} more" if len(ordered) > shown else "")


# ---- for users' workers ---------------------------------------------------------------------------


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Number the tokens of each row from 0, (bsz, length) int64; padding before the first one is 0 too.

    >>> compute_position_id_with_mask(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist()
    [[0, 0, 0, 1], [0, 1, 2, 2]]
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Write the number of parameters of a model, to standard output."""
    count = sum(parameter.numel() for parameter in model.parameters())
    show(f"{name or type(model).__name__} has {parameters_in_words(count)}")


def convert_weight_keys(state_dict: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return whole weights under the names that the model's files have, which rollout engines expect."""
    return names_on_disk(model, state_dict)


def extract_multi_modal_inputs(
    batch_data: Sequence[Mapping[str, torch.Tensor]], indices: Sequence[int] | None = None
) -> dict[str, object]:
    """Join the inputs of a processor, such as ``pixel_values``, over the rows of a batch.

    Args:
        batch_data: the inputs of each row by name; a row without images may lack them.
        indices: the rows to join, in this order; by default all.

    Returns:
        each input joined along its first dimension.
    """
    rows = batch_data if indices is None else [batch_data[index] for index in indices]
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    return {name: torch.cat([row[name] for row in rows if row.get(name) is not None]) for name in names}
