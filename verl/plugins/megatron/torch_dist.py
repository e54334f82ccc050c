"""Write a model folder as a ``torch_dist`` checkpoint, which ``dist_checkpointing.load`` of megatron-core reads.

The names are those of a ``GPTModel``: with the layers as first dimension if all are alike, else one tensor for each
layer, as megatron-core itself chooses. A norm has a name of its own or belongs to the layer that follows, by the
implementation of the layers, so it is written under both names; and so are empty states (``_extra_state``), which
TransformerEngine's layers ask for. One weight at a time is in memory.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from transformers import PretrainedConfig

from verl.checkpoint.core_weights import (
    EXPERTS,
    HALVES,
    IN_LAYER,
    LATENT_QUERIES,
    LAYER,
    OUTSIDE,
    QUERIES_KEYS_VALUES,
)
from verl.checkpoint.torch_dist import TorchDistFiles
from verl.errors import CheckpointError
from verl.model_merger.fsdp import empty_model
from verl.plugins.megatron.files import ModelFiles
from verl.utils.model import load_hf_config
from verl.workers.engine.model.headed import own_state

logger = logging.getLogger(__name__)

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def export(source: Path, target: Path, trust_remote_code: bool = False) -> None:
    """Write the model in ``source`` to ``target``, read it back and compare bit for bit.

    Args:
        source: a model folder with safetensors.
        target: folder to make.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        CheckpointError: ``source`` is no model folder, or of a model that has no layers in megatron-core; or ``target``
            has files already.
    """
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"{source} is no model folder: it has no config.json. Make one of a checkpoint first: verl merge {source} "
            "--target_dir MODEL."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already. Name a folder that does not exist, or is empty.")
    config = load_hf_config(str(source), trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in own_state(empty_model(config, trust_remote_code)).items()}
    files, text = ModelFiles(str(source)), config.get_text_config()
    planner = _Planner(_CoreBoxes(shapes, files, text))
    target.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save({}, storage_writer=dcp.FileSystemWriter(target), planner=planner, no_dist=True)
    torch.save({}, target / "common.pt")
    (target / "metadata.json").write_text(json.dumps(_BACKENDS))
    written = TorchDistFiles(target)
    for part in planner.parts.values():
        values = part.read()
        if values is not None and not torch.equal(written.read(part.name, part.start, part.size), values):
            raise CheckpointError(f"'{part.name}' is not what was written to {target}: the disk or a library erred.")
    logger.info("wrote %s: %d weights, read back and equal", target, len(shapes))


@dataclass(frozen=True)
class _CoreBox:
    """A box of a tensor, or an empty state in place of one."""

    name: str
    shape: tuple[int, ...] = ()
    """Shape of the full tensor."""
    start: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    values: Callable[[], Tensor] | None = None
    """Function that reads the box; None for an empty state."""

    @property
    def index(self) -> MetadataIndex:
        """Key of the box in the index of the checkpoint."""
        return MetadataIndex(self.name, None if self.values is None else torch.Size(self.start))

    def read(self) -> Tensor | None:
        """Read the box."""
        return None if self.values is None else self.values().reshape(self.size)


class _CoreBoxes:
    """Boxes of the tensors that megatron-core stores of a model.

    Args:
        shapes: of all weights, by their Transformers name.
        files: that hold them.
        config: of the text model.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], files: ModelFiles, config: PretrainedConfig) -> None:
        self.shapes, self.files, self.config = shapes, files, config
        layers: list[dict[str, tuple[int, ...]]] = [{} for _ in range(config.num_hidden_layers)]
        for name, shape in shapes.items():
            if match := LAYER.fullmatch(name):
                layers[int(match[1])][match[2]] = shape
        self._is_stacked = all(layer == layers[0] for layer in layers)
        self._is_latent = getattr(config, "kv_lora_rank", None) is not None

    def __iter__(self) -> Iterator[_CoreBox]:
        for name, shape in self.shapes.items():
            if match := LAYER.fullmatch(name):
                yield from self._layer_boxes(name, int(match[1]), match[2])
            elif name in OUTSIDE:
                read = partial(self.files.read, name, shape, _full_box(shape))
                yield _CoreBox(OUTSIDE[name], shape, *_full_box(shape), self._dtype(name), read)
            else:
                raise self._unknown(name)
        for layer in range(self.config.num_hidden_layers):
            yield self._empty_state("self_attention.core_attention", layer)

    @staticmethod
    def _unknown(name: str) -> CheckpointError:
        return CheckpointError(
            f"the weight {name} has no name in megatron-core's GPTModel. Its layers are those of Qwen2, Qwen3, Llama, "
            "Mistral, Qwen3-MoE, Mixtral, DeepSeek-V3 and GLM-4.5 without images."
        )

    def _layer_boxes(self, name: str, layer: int, inside: str) -> Iterator[_CoreBox]:
        shape = self.shapes[name]
        if experts := EXPERTS.fullmatch(inside):
            yield from self._experts(name, layer, is_gated=experts[1] == "gate_up_proj")
        elif halves := HALVES.fullmatch(inside):
            module, is_up = f"mlp.{halves[1]}linear_fc1", halves[2] == "up"
            yield self._in_layer(f"{module}.weight", layer, name, (2 * shape[0], shape[1]), (is_up * shape[0], 0))
            if not is_up:
                yield self._empty_state(module, layer)
        elif inside == "self_attn.q_proj.weight" and self._is_latent:
            yield from self._same_tensor(name, layer, (LATENT_QUERIES,))
        elif part := QUERIES_KEYS_VALUES.fullmatch(inside):
            if part[1] == "q":
                yield from self._qkv(name, layer, part[2])
        elif inside in IN_LAYER:
            yield from self._same_tensor(name, layer, IN_LAYER[inside])
        else:
            raise self._unknown(name)

    def _same_tensor(self, name: str, layer: int, endings: tuple[str, ...]) -> Iterator[_CoreBox]:
        """A weight that is a tensor in megatron-core too, under each of ``endings``."""
        for ending in endings:
            if self._is_latent and ending.startswith("self_attention.linear_qkv."):
                continue  # latent attention has no such layer
            yield self._in_layer(ending, layer, name, self.shapes[name])
            module, _, kind = ending.rpartition(".")
            if kind == "weight" and not module.endswith("router"):
                yield self._empty_state(module, layer)

    def _qkv(self, name: str, layer: int, kind: str) -> Iterator[_CoreBox]:
        """Yield the joint projection, which has for each key head its queries, the key and its value."""
        names = [name.replace("q_proj", f"{which}_proj") for which in "qkv"]
        groups = self.config.num_key_value_heads

        def values() -> Tensor:
            weights = (self.files.read(n, self.shapes[n], _full_box(self.shapes[n])) for n in names)
            return torch.cat([weight.unflatten(0, (groups, -1)) for weight in weights], dim=1)

        shape = (sum(self.shapes[n][0] for n in names), *self.shapes[name][1:])
        yield self._in_layer(f"self_attention.linear_qkv.{kind}", layer, name, shape, values=values)
        if kind == "weight":
            yield self._empty_state("self_attention.linear_qkv", layer)

    def _experts(self, name: str, layer: int, is_gated: bool) -> Iterator[_CoreBox]:
        count, rows, columns = shape = self.shapes[name]
        module = f"mlp.experts.experts.linear_{'fc1' if is_gated else 'fc2'}"
        height = rows // 2 if is_gated else rows
        for expert in range(count):
            for first in range(0, rows, height):
                box = start, size = (expert, first, 0), (1, height, columns)
                read = partial(self.files.read, name, shape, box)
                yield self._in_layer(f"{module}.weight", layer, name, shape, start, size, read)
            yield self._empty_state(module, layer, (expert,), (count,))

    def _in_layer(
        self,
        ending: str,
        layer: int,
        name: str,
        shape: tuple[int, ...],
        start: tuple[int, ...] | None = None,
        size: tuple[int, ...] | None = None,
        values: Callable[[], Tensor] | None = None,
    ) -> _CoreBox:
        """A box of a tensor of ``shape``, by default the whole weight ``name``, at ``start``."""
        read = values or partial(self.files.read, name, self.shapes[name], _full_box(self.shapes[name]))
        size = size or (shape if values else self.shapes[name])
        stem, first, count = self._layer(layer)
        ones = (1,) * len(first)
        start = start or (0,) * len(shape)
        return _CoreBox(f"{stem}{ending}", (*count, *shape), (*first, *start), (*ones, *size), self._dtype(name), read)

    def _empty_state(
        self, module: str, layer: int, index: tuple[int, ...] = (), count: tuple[int, ...] = ()
    ) -> _CoreBox:
        """The state of a module besides its weights; one name for each layer and expert."""
        stem, first, layers = self._layer(layer)
        at, of = (*first, *index) or (0,), (*layers, *count) or (1,)
        return _CoreBox(f"{stem}{module}._extra_state/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, of))}")

    def _layer(self, layer: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Beginning of its names, its index in the first dimension and the size of that, or none."""
        if self._is_stacked:
            return "decoder.layers.", (layer,), (self.config.num_hidden_layers,)
        return f"decoder.layers.{layer}.", (), ()

    def _dtype(self, name: str) -> torch.dtype:
        shape = self.shapes[name]
        return self.files.read(name, shape, ((0,) * len(shape), (1,) * len(shape))).dtype


def _full_box(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * len(shape), shape


class _Planner(dcp.SavePlanner):
    """Lets PyTorch write the parts, one at a time."""

    def __init__(self, parts: Iterable[_CoreBox]) -> None:
        self.parts = {part.index: part for part in parts}

    def set_up_planner(
        self, state_dict: dict[str, object], storage_meta: object = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the parts are known."""

    def create_local_plan(self) -> SavePlan:
        """List all parts."""
        items = []
        for index, part in self.parts.items():
            if part.values is None:
                items.append(WriteItem(index, WriteItemType.BYTE_IO))
                continue
            box = ChunkStorageMetadata(torch.Size(part.start), torch.Size(part.size))
            data = TensorWriteData(box, TensorProperties(dtype=part.dtype), torch.Size(part.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Describe all tensors."""
        described: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
        for part in self.parts.values():
            if part.values is None:
                described[part.name] = BytesStorageMetadata()
                continue
            properties = TensorProperties(dtype=part.dtype)
            tensor = described.setdefault(part.name, TensorStorageMetadata(properties, torch.Size(part.shape), []))
            assert isinstance(tensor, TensorStorageMetadata)
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(part.start), torch.Size(part.size)))
        return all_plans, Metadata(described)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Read the values of a part."""
        values = self.parts[write_item.index].read()
        if values is not None:
            return values
        state = io.BytesIO()
        torch.save([None], state)  # as megatron-core stores the state of a layer without one
        return state
