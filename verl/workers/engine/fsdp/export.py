"""Writing a model as Transformers reads it: config, tokenizer, safetensors."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from verl.errors import ConfigError
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.config import HFModelConfig

if TYPE_CHECKING:
    from verl.workers.engine.fsdp.engine import FSDPEngine

logger = logging.getLogger(__name__)


def whole_weights(engine: FSDPEngine) -> dict[str, Tensor]:
    """All weights under their Transformers names, own copies, on rank 0; the other ranks get none. Collective.

    Weights keep the format in which they are trained (``model_dtype``).
    """
    is_first = dist.get_rank() == 0
    weights: dict[str, Tensor] = {}
    for name, tensor in engine.get_per_tensor_param():
        if is_first:
            weights[name] = tensor.to("cpu", copy=True)
    return weights


def write_huggingface(engine: FSDPEngine, folder: Path, weights: dict[str, Tensor] | None) -> None:
    """Config and tokenizer of the engine's model to ``folder``, and ``weights`` unless None.

    A value model becomes a ``...ForTokenClassification`` with one label.
    """
    write_model_folder(engine.model.hf, engine.model.head_name, weights, folder)
    write_tokenizer(engine.model_config, folder)


def write_model_folder(hf: PreTrainedModel, head_name: str, weights: dict[str, Tensor] | None, folder: Path) -> None:
    """Config, generation config and, unless None, ``weights`` of a model whose head is ``head_name``."""
    folder.mkdir(parents=True, exist_ok=True)
    if weights is not None:
        hf.save_pretrained(folder, state_dict=weights)
    config = export_config(hf, head_name)
    config.save_pretrained(folder)
    if hf.can_generate() and hf.generation_config is not None and head_name == "lm_head":
        hf.generation_config.save_pretrained(folder)


def export_config(hf: PreTrainedModel, head_name: str) -> PretrainedConfig:
    """The config of ``hf`` under the architecture that its head makes it."""
    config = copy.deepcopy(hf.config)
    architecture = type(hf).__name__
    if head_name == "score":
        config.num_labels = 1
        if not architecture.endswith("Classification"):
            architecture = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, architecture)
    config.architectures = [architecture]
    return config


def write_tokenizer(model: HFModelConfig, folder: Path) -> None:
    """The tokenizer of ``model`` to ``folder``; a model without one is exported without one."""
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
