"""Export of a model in the Transformers format: config, tokenizer, safetensors."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.checkpoint.ranks import on_all_ranks
from verl.config import HFModelConfig
from verl.errors import ConfigError
from verl.utils.model import resolve_model_path
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.transformers_private import names_on_disk, token_classifier_of, write_model_code
from verl.vision.processor import write_processor

logger = logging.getLogger(__name__)

FILE_BYTES = 2 << 30
"""Size from which on a file of an exported model is full."""


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


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of an exported model that this rank writes."""

    tensors: dict[str, dict[str, Tensor]]
    """Weights in CPU memory, by the name of the file and their name in it."""
    index: dict[str, object] | None
    """Which file has which weight, over all ranks; None if there is one file."""

    @classmethod
    def collect(
        cls, per_tensor: Iterator[tuple[str, Tensor]], hf: PreTrainedModel, file_bytes: int = FILE_BYTES
    ) -> WeightFiles:
        """Divide all weights into files, and keep those of this rank's files in their training format. Collective.

        No rank holds the whole model: files are dealt to the ranks in turn, and a rank sees the weights of other ranks'
        files one at a time. A file ends with the layer that fills it.

        Args:
            per_tensor: result of an engine's ``get_per_tensor_param``.
            hf: the model, which knows the names on disk.
            file_bytes: size from which on a file is full.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        held: dict[int, dict[str, Tensor]] = {}
        file_index, size, unit = 0, 0, ""
        for name, tensor in per_tensor:  # every rank must iterate to the end: gathering is collective
            # What Transformers joins when it reads, such as the experts of a layer, is in one file. So a unit is the
            # layer of a weight, model.layers.3; outside of layers the weight itself.
            next_unit = re.sub(r"(\.\d+)\..*", r"\1", name)
            if next_unit != unit and size >= file_bytes:
                file_index, size = file_index + 1, 0
            unit, size = next_unit, size + tensor.nbytes
            if file_index % ranks == rank:
                held.setdefault(file_index, {})[name] = tensor.to("cpu", copy=True)
        with on_all_ranks("export the model"):
            tensors_here = {index: names_on_disk(hf, part) for index, part in held.items()}
        sizes: list[dict[int, dict[str, tuple[int, int]]]] = [{} for _ in range(ranks)]
        mine = {
            i: {name: (weight.nbytes, weight.numel()) for name, weight in part.items()}
            for i, part in tensors_here.items()
        }
        dist.all_gather_object(sizes, mine)
        files = {_file_name(i, file_index + 1): part for i, part in sorted(p for s in sizes for p in s.items())}
        file_sizes = [size for part in files.values() for size in part.values()]
        index = {
            "metadata": {
                "total_parameters": sum(n for _, n in file_sizes),
                "total_size": sum(size for size, _ in file_sizes),
            },
            "weight_map": {name: file for file, part in files.items() for name in sorted(part)},
        }
        return cls(
            {_file_name(i, file_index + 1): part for i, part in tensors_here.items()}, index if file_index else None
        )

    def write(self, folder: Path) -> None:
        """Write this rank's files and, on rank 0, the index."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, weights in self.tensors.items():
            parts = {key: weight.contiguous() for key, weight in weights.items()}
            save_file(parts, folder / name, metadata={"format": "pt"})
        if self.index is not None and dist.get_rank() == 0:
            text = json.dumps(self.index, indent=2, sort_keys=True)
            (folder / "model.safetensors.index.json").write_text(f"{text}\n")


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_model_folder(hf: PreTrainedModel, head_name: str, with_weights: bool, folder: Path) -> None:
    """Write config, generation config and code of a model, for ``with_weights`` as they belong to its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = export_config(hf, head_name)
    if with_weights:
        config.dtype = hf.dtype
        write_model_code(hf, folder, config)
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
