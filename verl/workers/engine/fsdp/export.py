"""Export of a model in the Transformers format: config, tokenizer, safetensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.config import HFModelConfig
from verl.errors import ConfigError
from verl.utils.model import resolve_model_path
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.transformers_private import token_classifier_of
from verl.vision.processor import write_processor

logger = logging.getLogger(__name__)


def weights_on_first_rank(per_tensor: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy all weights to CPU memory on rank 0, in the format in which they are trained. Collective.

    Args:
        per_tensor: result of an engine's ``get_per_tensor_param``.

    Returns:
        the weights on rank 0, an empty dictionary elsewhere.
    """
    is_first = dist.get_rank() == 0
    weights: dict[str, Tensor] = {}
    for name, tensor in per_tensor:  # every rank must iterate to the end: gathering is collective
        if is_first:
            weights[name] = tensor.to("cpu", copy=True)
    return weights


def write_model_folder(hf: PreTrainedModel, head_name: str, weights: dict[str, Tensor] | None, folder: Path) -> None:
    """Write config, generation config and, unless None, ``weights``; the config is that of :func:`export_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    if weights is not None:
        hf.save_pretrained(folder, state_dict=weights)
    config = export_config(hf, head_name)
    config.save_pretrained(folder)
    if hf.can_generate() and hf.generation_config is not None and head_name == "lm_head":
        hf.generation_config.save_pretrained(folder)


def export_config(hf: PreTrainedModel, head_name: str) -> PretrainedConfig:
    """Return a copy of the config of ``hf`` that names the architecture which fits the head ``head_name``.

    A causal language model with a ``score`` head becomes a ``...ForTokenClassification`` with one label.
    """
    config = copy.deepcopy(hf.config)
    architecture = type(hf).__name__
    if head_name == "score":
        config.num_labels = 1
        if not architecture.endswith("Classification"):
            architecture = token_classifier_of(config.model_type) or architecture
    config.architectures = [architecture]
    return config


def write_tokenizer(model: HFModelConfig, folder: Path) -> None:
    """Write the tokenizer of ``model``, and its processor, to ``folder``; only warn if the model has no tokenizer."""
    path = resolve_model_path(model.tokenizer_path or model.path)
    write_processor(path, folder, trust_remote_code=model.trust_remote_code)
    try:
        tokenizer = hf_tokenizer(
            model.tokenizer_path or model.path,
            correct_pad_token=False,
            custom_chat_template=model.custom_chat_template,
            trust_remote_code=model.trust_remote_code,
        )
    except ConfigError as error:
        logger.warning("exported without a tokenizer: %s", error)
        return
    tokenizer.save_pretrained(folder)
