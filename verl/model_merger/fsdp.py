"""Merge the files of a checkpoint, by FSDP or Megatron, into one model, and compare the two."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.checkpoint.boxes import LAYOUT_FILE, Boxes
from verl.checkpoint.shards import assemble, read_shards, saved_world_size
from verl.errors import CheckpointError, ConfigError
from verl.model_merger.lora import PUBLIC_PREFIX, Adapted, has_adapters, merged_public
from verl.utils.model import load_hf_config
from verl.utils.model_code import LOADING_ERRORS, warn_if_code_runs, why_unreadable
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine.fsdp.model import own_state

logger = logging.getLogger(__name__)

_AUTO = {
    "ForCausalLM": transformers.AutoModelForCausalLM,
    "LMHeadModel": transformers.AutoModelForCausalLM,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
}


def merge(
    local_dir: str | Path,
    target_dir: str | Path,
    tie_word_embedding: bool = False,
    trust_remote_code: bool = False,
    is_value_model: bool = False,
    base_model: str | None = None,
) -> None:
    """Write a checkpoint as safetensors with config and tokenizer, then read it back and compare exactly.

    Args:
        local_dir: a checkpoint's ``actor`` or ``critic`` folder.
        target_dir: the model folder; created if needed, its old safetensors files are removed.
        tie_word_embedding: write output and input embedding as one weight; they must be equal.
        trust_remote_code: run Python code that comes with the model.
        is_value_model: refuse any architecture but a value model.
        base_model: of LoRA adapters, the model that they were trained on, if it is not where it was.
    """
    source = Path(local_dir).expanduser()
    if not (source / "huggingface" / "config.json").is_file():
        raise CheckpointError(f"{source / 'huggingface' / 'config.json'} is missing; give a checkpoint's actor folder.")
    config = load_hf_config(str(source / "huggingface"), trust_remote_code=trust_remote_code)
    if is_value_model and not str((config.architectures or [""])[0]).endswith("ForTokenClassification"):
        raise CheckpointError(f"{source} holds a {(config.architectures or ['?'])[0]}, not a value model.")
    weights = whole_weights(source)
    adapted: Adapted | None = None
    if has_adapters(weights):
        weights, adapted = _with_adapters(weights, source, config, base_model, trust_remote_code)
    if tie_word_embedding:
        _tie(weights, config)
    model = _empty_model(config, trust_remote_code)
    _drop_tied(weights, set(own_state(model)))
    _check_names(weights, set(own_state(model)), source)
    target = Path(target_dir).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    # An earlier merge may have split the weights into other files.
    for old in target.glob("*.safetensors*"):
        old.unlink()
    model.save_pretrained(target, state_dict=dict(weights))  # a copy, as save_pretrained empties the dict
    config.save_pretrained(target)
    _copy_tokenizer(source / "huggingface", target, trust_remote_code)
    merged = _compare(weights, target, trust_remote_code, tolerance=0.0)
    if adapted is not None:
        adapted.check_logits(merged, target)
    logger.info("wrote %s: %d weights, read back and equal", target, len(weights))


def compare(
    local_dir: str | Path, hf_dir: str | Path, trust_remote_code: bool = False, base_model: str | None = None
) -> None:
    """Check that a checkpoint and a model folder hold the same weights, up to 1e-6, else ``CheckpointError``.

    LoRA adapters are merged into ``base_model``, by default the model that they were trained on.
    """
    source, target = Path(local_dir).expanduser(), Path(hf_dir).expanduser()
    weights, adapted = whole_weights(source), None
    if has_adapters(weights):
        config = load_hf_config(str(source / "huggingface"), trust_remote_code=trust_remote_code)
        weights, adapted = _with_adapters(weights, source, config, base_model, trust_remote_code)
    model = _compare(weights, target, trust_remote_code, tolerance=1e-6)
    if adapted is not None:
        adapted.check_logits(model, target)
    logger.info("%s and %s hold the same %d weights", local_dir, hf_dir, len(weights))


def _with_adapters(
    weights: dict[str, Tensor], source: Path, config: PretrainedConfig, base_model: str | None, trust_remote_code: bool
) -> tuple[dict[str, Tensor], Adapted | None]:
    """Merge adapters; also return the model that has them apart, unless verl 0.8 saved the shards."""
    if any(name.startswith(PUBLIC_PREFIX) for name in weights):
        return merged_public(weights, source), None
    adapted = Adapted(weights, source, str((config.architectures or [""])[0]), base_model, trust_remote_code)
    return adapted.merged_weights(), adapted


def whole_weights(folder: Path) -> dict[str, Tensor]:
    """Assemble all weights of a checkpoint, by their Transformers names, tied ones once."""
    if (folder / LAYOUT_FILE).is_file():
        boxes = Boxes.read(folder, "model")
        return {name: boxes.cut(name, (0,) * len(boxes.shape(name)), boxes.shape(name)) for name in boxes.names()}
    shards = read_shards(folder, "model", saved_world_size(folder))
    shapes = shards[0]["shapes"]
    return {name: assemble(shards, name, 0, shape[0] if shape else 0) for name, shape in shapes.items()}


def _auto_class(config: PretrainedConfig) -> Any:
    architecture = str((config.architectures or [""])[0])
    for ending, auto in _AUTO.items():
        if architecture.endswith(ending):
            return auto
    raise CheckpointError(f"architecture '{architecture}' is none of ...{', ...'.join(_AUTO)}.")


def _empty_model(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model = _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise CheckpointError(f"no model can be made: {why_unreadable(error, str(config.name_or_path))}") from error
    warn_if_code_runs(model, str(config.name_or_path))
    model.tie_weights()
    return model


def _tie(weights: dict[str, Tensor], config: PretrainedConfig) -> None:
    head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    if head is not None and (embedding is None or not torch.equal(head, embedding)):
        raise CheckpointError("--tie-word-embedding: lm_head.weight and model.embed_tokens.weight differ.")
    weights.pop("lm_head.weight", None)
    config.tie_word_embeddings = True


def _drop_tied(weights: dict[str, Tensor], expected: set[str]) -> None:
    """Leave out weights that the model does not have and that equal one it has: tied ones, which verl 0.8 saves too."""
    for name in sorted(weights.keys() - expected):
        if any(torch.equal(weights[name], weights[other]) for other in expected & weights.keys()):
            del weights[name]


def _check_names(weights: Mapping[str, Tensor], expected: set[str], source: Path) -> None:
    missing, unknown = sorted(expected - weights.keys()), sorted(weights.keys() - expected)
    if missing or unknown:
        raise CheckpointError(
            f"{source}: the shards are not those of its config: missing {missing[:3] or 'nothing'}, unknown "
            f"{unknown[:3] or 'nothing'}."
        )


def _compare(weights: Mapping[str, Tensor], folder: Path, trust_remote_code: bool, tolerance: float) -> PreTrainedModel:
    """Compare weights with those of the model in ``folder``, and return that model."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no model folder: it has no config.json.")
    config = load_hf_config(str(folder), trust_remote_code=trust_remote_code)
    try:
        model = _auto_class(config).from_pretrained(
            folder, config=config, dtype="auto", trust_remote_code=trust_remote_code
        )
    except LOADING_ERRORS as error:
        raise CheckpointError(f"{folder} cannot be read: {why_unreadable(error, str(folder))}") from error
    found = own_state(model)
    _check_names(weights, set(found), folder)
    for name, weight in weights.items():
        other = found[name]
        if weight.shape != other.shape:
            raise CheckpointError(f"'{name}' has shape {list(weight.shape)}, and {list(other.shape)} in {folder}.")
        gap = float((weight.float() - other.float()).abs().max()) if weight.numel() else 0.0
        if not gap <= tolerance:  # so that NaN is refused too
            raise CheckpointError(f"'{name}' differs from the one in {folder} by up to {gap:.3g}.")
    return model


def _copy_tokenizer(source: Path, target: Path, trust_remote_code: bool) -> None:
    try:
        tokenizer = hf_tokenizer(str(source), correct_pad_token=False, trust_remote_code=trust_remote_code)
    except ConfigError:
        logger.warning("%s holds no tokenizer, so the model folder has none", source)
        return
    tokenizer.save_pretrained(target)
