"""Export of a model in the Transformers format: config, tokenizer, safetensors."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.checkpoint.ranks import on_all_ranks
from verl.config import HFModelConfig
from verl.errors import ConfigError
from verl.utils.folder_weights import stored_heads
from verl.utils.model import get_generation_config, resolve_model_path, set_dropout, weights_folder
from verl.utils.model_facts.prediction_heads import head_count
from verl.utils.tokenizer import tokenizer_of
from verl.utils.transformers_private import kept_in_fp32, names_on_disk, token_classifier_of, write_model_code
from verl.vision.processor import write_processor
from verl.workers.engine.model.headed import HeadedModel

logger = logging.getLogger(__name__)

FILE_BYTES = 2 << 30
"""Size from which on a file of an exported model is full."""

_WEIGHTS = re.compile(r"^config\.json$|\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|partial)$|\.index\.json$")

Sizes: TypeAlias = Mapping[str, tuple[int, int]]
"""Bytes and elements of the weights in a file, by their names there."""


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


def stored_format(hf: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    """Return a function that converts the weight of a name to ``dtype``.

    Buffers, and what Transformers keeps in fp32, such as a router's bias, stay as they are.
    """
    buffers, fp32 = {name for name, _ in hf.named_buffers()}, kept_in_fp32(hf, dtype)
    return lambda name, tensor: tensor if name in buffers or fp32.search(name) else tensor.to(dtype)


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of an exported model that this rank writes."""

    tensors: dict[str, dict[str, Tensor]]
    """Weights in CPU memory, by the name of the file and their name in it."""
    index: dict[str, object] | None
    """Map from each weight to its file, over all ranks; None if there is one file."""

    @classmethod
    def collect(
        cls,
        per_tensor: Iterator[tuple[str, Tensor]],
        model: HeadedModel,
        file_bytes: int = FILE_BYTES,
        stored: Iterable[tuple[str, Tensor]] = (),
    ) -> WeightFiles:
        """Divide all weights into files; keep the weights of this rank's files, in the format on disk. Collective.

        No rank holds the whole model: files are dealt to the ranks in turn, and a rank sees the weights of other ranks'
        files one at a time. A file ends with the layer that fills it.

        Args:
            per_tensor: result of an engine's ``get_per_tensor_param``.
            model: knows the names and the precision on disk.
            file_bytes: size from which on a file is full.
            stored: further weights under their names in files, such as those of :func:`untrained_heads`.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        held: dict[int, dict[str, Tensor]] = {}
        as_stored: dict[int, dict[str, Tensor]] = {}
        file_index = 0
        # Every rank must iterate to the end: gathering is collective.
        for file_index, is_stored, name, tensor in _in_files(_as_stored(per_tensor, model), stored, file_bytes):
            if file_index % ranks == rank:
                files = as_stored if is_stored else held
                files.setdefault(file_index, {})[name] = tensor.to("cpu", copy=True)
        with on_all_ranks("export the model"):
            tensors_here = {index: names_on_disk(model.hf, part) for index, part in held.items()}
        for index, part in as_stored.items():
            tensors_here[index] = tensors_here.get(index, {}) | part
        index = _index_of(_gathered({i: _sizes_of(part) for i, part in tensors_here.items()}), file_index + 1)
        return cls(
            {_file_name(i, file_index + 1): part for i, part in tensors_here.items()}, index if file_index else None
        )

    def write(self, folder: Path) -> None:
        """Write this rank's files and, on rank 0, the index."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, weights in self.tensors.items():
            _save(weights, folder / name)
        if self.index is not None and dist.get_rank() == 0:
            _write_index(self.index, folder)


def write_in_turn(
    per_tensor: Iterator[tuple[str, Tensor]],
    model: HeadedModel,
    folder: Path,
    file_bytes: int = FILE_BYTES,
    stored: Iterable[tuple[str, Tensor]] = (),
) -> None:
    """Write weights as the model's files, dealt to the ranks in turn, of which each holds one at a time. Collective.

    A rank writes its file while the others gather theirs; rank 0 adds the index. Arguments are as of
    :meth:`WeightFiles.collect`; ``folder`` is created.

    Raises:
        CheckpointError: on every rank, if a file could not be written.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes: dict[int, Sizes] = {}
    held, as_stored = dict[str, Tensor](), dict[str, Tensor]()
    held_index = file_index = 0

    def write(index: int, weights: dict[str, Tensor], stored_weights: dict[str, Tensor]) -> None:
        sizes[index] = _save(names_on_disk(model.hf, weights) | stored_weights, folder / _unfinished(index))

    with ThreadPoolExecutor(1, "export") as writer:
        writes: list[Future[None]] = [writer.submit(folder.mkdir, parents=True, exist_ok=True)]
        # Every rank must iterate to the end, also after an error of its own: gathering is collective.
        for file_index, is_stored, name, tensor in _in_files(_as_stored(per_tensor, model), stored, file_bytes):
            if (held or as_stored) and file_index != held_index:
                writes.append(writer.submit(write, held_index, held, as_stored))
                held, as_stored = {}, {}
            # Waits until the file before is written, and freed.
            if file_index % ranks == rank and writes[-1].exception() is None:
                held_index = file_index
                (as_stored if is_stored else held)[name] = tensor.to("cpu", copy=True)
        if held or as_stored:
            writes.append(writer.submit(write, held_index, held, as_stored))
    with on_all_ranks("export the model"):
        for pending in writes:
            pending.result()
    all_sizes = _gathered(sizes)
    with on_all_ranks("export the model"):
        for index in sizes:  # how many there are is in each name
            (folder / _unfinished(index)).rename(folder / _file_name(index, file_index + 1))
        if file_index and rank == 0:
            _write_index(_index_of(all_sizes, file_index + 1), folder)


def write_in_files(
    weights: Iterable[tuple[str, Tensor]], hf: PreTrainedModel, folder: Path, file_bytes: int = FILE_BYTES
) -> None:
    """Write weights as the model's files from a single process, which holds the weights of one file at a time.

    Safetensors that ``folder`` has are replaced once all weights are written, so that an error keeps them.

    Args:
        weights: by the names of ``hf``; all of a layer come one after the other.
        hf: the model, which knows the names on disk.
        folder: the model folder.
        file_bytes: size from which on a file is full; it ends with the layer that fills it.
    """
    for unfinished in folder.glob("*.safetensors.partial"):
        unfinished.unlink()
    sizes: dict[int, Sizes] = {}
    for index, part in groupby(_in_files(weights, (), file_bytes), key=itemgetter(0)):
        # Without a name, so that it is freed before the next file is read.
        sizes[index] = _save(
            names_on_disk(hf, {name: tensor for _, _, name, tensor in part}), folder / _unfinished(index)
        )
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):  # maybe divided otherwise
        old.unlink()
    for index in sizes:  # how many there are is in each name
        (folder / _unfinished(index)).rename(folder / _file_name(index, len(sizes)))
    if len(sizes) > 1:
        _write_index(_index_of(sizes, len(sizes)), folder)


def _as_stored(per_tensor: Iterator[tuple[str, Tensor]], model: HeadedModel) -> Iterator[tuple[str, Tensor]]:
    convert = stored_format(model.hf, model.stored_dtype)
    return ((name, convert(name, tensor)) for name, tensor in per_tensor)


def _in_files(
    weights: Iterable[tuple[str, Tensor]], stored: Iterable[tuple[str, Tensor]], file_bytes: int
) -> Iterator[tuple[int, bool, str, Tensor]]:
    """Yield the index of the file of each weight, whether it is one of ``stored``, its name and itself."""
    index, size, unit = 0, 0, ""
    for is_stored, part in ((False, weights), (True, stored)):
        for name, tensor in part:
            next_unit = _unit_of(name)
            if next_unit != unit and size >= file_bytes:
                index, size = index + 1, 0
            unit, size = next_unit, size + tensor.nbytes
            yield index, is_stored, name, tensor


def _save(weights: Mapping[str, Tensor], path: Path) -> Sizes:
    parts = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(parts, path, metadata={"format": "pt"})
    return _sizes_of(parts)


def _sizes_of(weights: Mapping[str, Tensor]) -> Sizes:
    return {name: (weight.nbytes, weight.numel()) for name, weight in weights.items()}


def _gathered(sizes: dict[int, Sizes]) -> dict[int, Sizes]:
    """Return the sizes in the files of all ranks, in the order of the files. Collective."""
    rank_sizes: list[dict[int, Sizes]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(rank_sizes, sizes)
    return dict(sorted(pair for part in rank_sizes for pair in part.items()))


def _unit_of(name: str) -> str:
    """The layer of a weight, such as model.layers.3; outside of layers the weight itself.

    What Transformers joins when it reads, such as the experts of a layer, is to be in one file.
    """
    return re.sub(r"(\.\d+)\..*", r"\1", name)


def _index_of(sizes: Mapping[int, Sizes], count: int) -> dict[str, object]:
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


def write_model_folder(section: HFModelConfig, model: HeadedModel, has_weights: bool, folder: Path) -> None:
    """Write the files of a model beside its weights: config, generation config, tokenizer, and code for its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = export_config(model)
    if has_weights:
        write_model_code(model.hf, folder, config)
    config.save_pretrained(folder)
    if model.hf.can_generate() and model.head_name == "lm_head":
        generation = get_generation_config(section.path) or model.hf.generation_config
        if generation is not None:
            generation.save_pretrained(folder)
    _write_tokenizer(section, config, folder)


def copy_companions(source: Path, target: Path) -> None:
    """Copy all files of a model folder but its weights and config.json, as which model it is follows from these."""
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(".") and not _WEIGHTS.search(file.name):
            shutil.copyfile(file, target / file.name)


def export_config(model: HeadedModel) -> PretrainedConfig:
    """Return a copy of the model's config that names the architecture which fits its head.

    A causal language model with a ``score`` head becomes a ``...ForTokenClassification`` with one label. Precision and
    rates of dropout are those of the folder that the model came from.
    """
    hf = model.hf
    config = copy.deepcopy(hf.config)
    set_dropout(config, model.unused_dropout)
    for part in (config, *vars(config).values()):
        if isinstance(part, PretrainedConfig):
            part.dtype = model.stored_dtype
    architecture = type(hf).__name__
    if model.head_name == "score":
        config.num_labels = 1
        if not architecture.endswith("Classification"):
            architecture = token_classifier_of(config.model_type) or architecture
    config.architectures = [architecture]
    return config


def _write_tokenizer(model: HFModelConfig, config: PretrainedConfig, folder: Path) -> None:
    """Write the tokenizer of ``model``, and its processor, to ``folder``; only warn if the model has no tokenizer."""
    path = resolve_model_path(model.tokenizer_path or model.path)
    write_processor(path, folder, trust_remote_code=model.trust_remote_code)
    try:
        tokenizer = tokenizer_of(model, correct_pad_token=False)
    except ConfigError as error:
        logger.warning("exported without a tokenizer: %s", error)
        return
    if str(config.architectures).endswith("ForSequenceClassification']"):  # it reads its score before the padding
        padding = config.get_text_config().pad_token_id
        tokenizer.pad_token = None if padding is None else tokenizer.convert_ids_to_tokens(padding)
    if model.custom_chat_template is not None:
        (folder / "chat_template.json").unlink(missing_ok=True)  # the processor's
    tokenizer.save_pretrained(folder)
    _use_older_names(folder / "tokenizer_config.json")


def _use_older_names(path: Path) -> None:
    """Write the class and the special tokens of a tokenizer by names that Transformers 4.57 reads, as 5 does too."""
    settings = json.loads(path.read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
