"""Export of a model in the Transformers format: config, tokenizer, safetensors."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.checkpoint.ranks import on_all_ranks
from verl.config import HFModelConfig
from verl.errors import ConfigError
from verl.utils.folder_weights import stored_heads
from verl.utils.model import resolve_model_path, weights_folder
from verl.utils.model_facts.prediction_heads import head_count
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
        cls,
        per_tensor: Iterator[tuple[str, Tensor]],
        hf: PreTrainedModel,
        file_bytes: int = FILE_BYTES,
        stored: Iterable[tuple[str, Tensor]] = (),
    ) -> WeightFiles:
        """Divide all weights into files, and keep those of this rank's files in their training format. Collective.

        No rank holds the whole model: files are dealt to the ranks in turn, and a rank sees the weights of other ranks'
        files one at a time. A file ends with the layer that fills it.

        Args:
            per_tensor: result of an engine's ``get_per_tensor_param``.
            hf: the model, which knows the names on disk.
            file_bytes: size from which on a file is full.
            stored: further weights under their names in files, such as those of :func:`untrained_heads`.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        held: dict[int, dict[str, Tensor]] = {}
        as_stored: dict[int, dict[str, Tensor]] = {}
        file_index, size, unit = 0, 0, ""
        sources = chain(((held, part) for part in per_tensor), ((as_stored, part) for part in stored))
        for files, (name, tensor) in sources:  # every rank must iterate to the end: gathering is collective
            next_unit = _unit_of(name)
            if next_unit != unit and size >= file_bytes:
                file_index, size = file_index + 1, 0
            unit, size = next_unit, size + tensor.nbytes
            if file_index % ranks == rank:
                files.setdefault(file_index, {})[name] = tensor.to("cpu", copy=True)
        with on_all_ranks("export the model"):
            tensors_here = {index: names_on_disk(hf, part) for index, part in held.items()}
        for index, part in as_stored.items():
            tensors_here[index] = tensors_here.get(index, {}) | part
        sizes: list[dict[int, dict[str, tuple[int, int]]]] = [{} for _ in range(ranks)]
        mine = {
            i: {name: (weight.nbytes, weight.numel()) for name, weight in part.items()}
            for i, part in tensors_here.items()
        }
        dist.all_gather_object(sizes, mine)
        index = _index_of(dict(sorted(p for s in sizes for p in s.items())), file_index + 1)
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
            _write_index(self.index, folder)


def write_in_files(
    weights: Iterable[tuple[str, Tensor]], hf: PreTrainedModel, folder: Path, file_bytes: int = FILE_BYTES
) -> None:
    """Write weights as the model's files, in this process alone, which holds those of one file at a time.

    Safetensors that ``folder`` has are replaced once all weights are written, so that an error keeps them.

    Args:
        weights: by the names of ``hf``; all of a layer come one after the other.
        hf: the model, which knows the names on disk.
        folder: the model folder.
        file_bytes: size from which on a file is full; it ends with the layer that fills it.
    """
    sizes: dict[int, dict[str, tuple[int, int]]] = {}
    held: dict[str, Tensor] = {}
    size, unit = 0, ""

    for unfinished in folder.glob("*.safetensors.partial"):
        unfinished.unlink()

    def write() -> None:
        parts = {name: weight.contiguous() for name, weight in names_on_disk(hf, held).items()}
        save_file(parts, folder / _unfinished(len(sizes)), metadata={"format": "pt"})
        sizes[len(sizes)] = {name: (weight.nbytes, weight.numel()) for name, weight in parts.items()}
        held.clear()

    for name, tensor in weights:
        next_unit = _unit_of(name)
        if next_unit != unit and size >= file_bytes:
            write()
            size = 0
        held[name] = tensor
        unit, size = next_unit, size + tensor.nbytes
    write()
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):  # maybe divided otherwise
        old.unlink()
    for index in sizes:  # how many there are is in each name
        (folder / _unfinished(index)).rename(folder / _file_name(index, len(sizes)))
    if len(sizes) > 1:
        _write_index(_index_of(sizes, len(sizes)), folder)


def _unit_of(name: str) -> str:
    """The layer of a weight, such as model.layers.3; outside of layers the weight itself.

    What Transformers joins when it reads, such as the experts of a layer, is to be in one file.
    """
    return re.sub(r"(\.\d+)\..*", r"\1", name)


def _index_of(sizes: Mapping[int, Mapping[str, tuple[int, int]]], count: int) -> dict[str, object]:
    """Return the index of ``count`` files: bytes and elements of each weight, by the number of its file."""
    all_sizes = [size for part in sizes.values() for size in part.values()]
    return {
        "metadata": {
            "total_parameters": sum(elements for _, elements in all_sizes),
            "total_size": sum(nbytes for nbytes, _ in all_sizes),
        },
        "weight_map": {name: _file_name(i, count) for i, part in sizes.items() for name in sorted(part)},
    }


def _write_index(index: Mapping[str, object], folder: Path) -> None:
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(f"{text}\n")


def _unfinished(index: int) -> str:
    return f"model-{index + 1:05d}.safetensors.partial"


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def untrained_heads(path: str, config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the heads of multi-token prediction in the model folder ``path``, whose config is ``config``.

    Transformers drops them, so that without these weights an exported model would lack what its config says.
    """
    folder = Path(resolve_model_path(path))
    if not folder.is_dir():
        if not head_count(config.to_dict()):
            return
        folder = weights_folder(path)
    yield from stored_heads(folder)


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
