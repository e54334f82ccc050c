"""Read the shards that verl 0.8 saves under FSDP and FSDP2, as rows in the form of :mod:`verl.checkpoint.shards`.

The files have the same names. ``model_*`` holds a ``ShardedTensor`` or ``DTensor`` for each weight, ``optim_*`` the
``state_dict()`` of the optimizer (under FSDP of flat parameters, one for each decoder layer and one for the rest),
``extra_state_*`` the schedule and random states. They are read by PyTorch's unpickler for weights, which calls nothing
but what PyTorch allows and the classes below; these only keep what they are given. Learning rate, betas and weight
decay come from the configuration of the run; random states are not taken over.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl.checkpoint.states import State
from verl.errors import CheckpointError

_LAYER = re.compile(r"(.*?\.\d+)\.")
_REMEDY = "Set load_contents=[model,extra] to begin with new moments."


class _UnloadedObject:
    """An object of a class that is not loaded; only its state is kept."""

    state: Any = None

    def __new__(cls, *_: object) -> _UnloadedObject:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        has_slots = isinstance(state, tuple) and len(state) == 2 and state[0] is None
        self.state = state[1] if has_slots else state


class _Sharded(Tensor):
    """A ``ShardedTensor``: whole shape and format, and this rank's parts with their offsets."""

    state: Any = None

    @classmethod
    def __torch_dispatch__(
        cls, function: object, *_: object
    ) -> object:  # PyTorch makes no tensor of a class without it
        raise CheckpointError(f"a sharded tensor of a file has no values to compute {function} with.")

    def __setstate__(self, state: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.state = state


def _attribute(owner: object, name: object) -> object:
    """The only use of ``getattr`` in these files: inner classes and members of classes that are not loaded."""
    if owner in (_Sharded, _UnloadedObject) and isinstance(name, str):
        return _UnloadedObject
    raise pickle.UnpicklingError(f"getattr({owner!r:.80}, {name!r:.80}) is none of a sharded tensor")


_SHARD = "torch.distributed._shard"
_NAMES: list[Callable | tuple[Callable, str]] = [
    (_Sharded, f"{_SHARD}.sharded_tensor.api.ShardedTensor"),
    (_attribute, "builtins.getattr"),
    *(
        (_UnloadedObject, name)
        for name in (
            f"{_SHARD}.sharded_tensor.shard.Shard",
            f"{_SHARD}.metadata.ShardMetadata",
            f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata",
            f"{_SHARD}.sharded_tensor.metadata.TensorProperties",
            f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
            f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
            f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec",
            "torch.distributed.remote_device._remote_device",
            # Random states of NumPy.
            "numpy.core.multiarray._reconstruct",
            "numpy._core.multiarray._reconstruct",
            "numpy.ndarray",
            "numpy.dtype",
            "_codecs.encode",
        )
    ),
]


def load_file(path: Path) -> object:
    """Read a ``.pt`` file of either format without running code from it; raises as ``torch.load``."""
    with torch.serialization.safe_globals(_NAMES):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def model_rows(state: Mapping[str, object], rank: int) -> State:
    """Convert the weights of one rank; a weight that shares its memory with an earlier one is left out."""
    parts: dict[str, tuple[Tensor, list[int], int]] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in state.items():
        local, shape, first = _part(name, tensor, rank)
        key = (local.data_ptr(), tuple(shape))
        if local.numel() and key in seen:
            continue
        seen.add(key)
        parts[name] = (local, shape, first)
    return _rows(parts)


def optimizer_rows(states: Sequence[State], shapes: Mapping[str, list[int]]) -> list[State]:
    """Convert the moments of all ranks.

    Args:
        states: what ``optim_*`` holds, by rank.
        shapes: of the weights that are trained, by name and in the order of the model.
    """
    groups = states[0]["param_groups"]
    count = sum(len(group["params"]) for group in groups)
    if len(groups) != 1:
        raise CheckpointError(f"its optimizer has {len(groups)} groups of parameters, and one is read. {_REMEDY}")
    if count == len(shapes):
        return [_moments(state["state"], shapes, rank) for rank, state in enumerate(states)]
    return [_flat_moments([state["state"] for state in states], shapes)]


def extra_state(state: State) -> State:
    """Return the position in the schedule, without random states, which belong to other samplers."""
    schedule = state.get("lr_scheduler")
    return {"lr_scheduler": schedule and {"last_epoch": int(schedule["last_epoch"])}, "rng": None}


def _rows(parts: Mapping[str, tuple[Tensor, list[int], int]]) -> dict[str, object]:
    return {
        "tensors": {name: local for name, (local, _, _) in parts.items()},
        "shapes": {name: shape for name, (_, shape, _) in parts.items()},
        "first_rows": {name: first for name, (_, _, first) in parts.items()},
    }


def _part(name: str, tensor: object, rank: int) -> tuple[Tensor, list[int], int]:
    """Return this rank's rows, the whole shape, and the number of the first row."""
    if isinstance(tensor, DTensor):
        return _part_of_dtensor(name, tensor, rank)
    if isinstance(tensor, _Sharded):
        shape = list(tensor.shape)
        shards = tensor.state[0]
        if not shards:
            return torch.empty((0, *shape[1:]), dtype=tensor.dtype), shape, 0
        if len(shards) > 1:
            raise CheckpointError(f"'{name}' has {len(shards)} parts on one rank, and one is read.")
        inner = shards[0].state
        offsets = inner["metadata"].state["shard_offsets"]
        if any(offsets[1:]):
            raise CheckpointError(f"'{name}' is not sharded by rows.")
        return inner["tensor"], shape, int(offsets[0]) if offsets else 0
    if isinstance(tensor, Tensor):
        return tensor, list(tensor.shape), 0
    raise CheckpointError(f"'{name}' is a {type(tensor).__name__}, not a tensor.")


def _part_of_dtensor(name: str, tensor: DTensor, rank: int) -> tuple[Tensor, list[int], int]:
    shape, mesh = list(tensor.shape), tensor.device_mesh.mesh
    coordinate = (mesh == rank).nonzero()
    first = 0
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard or placement.dim != 0 or len(coordinate) != 1:
            raise CheckpointError(f"'{name}' is placed as {placement}, and only rows are read.")
        rows = -(-shape[0] // mesh.size(dimension))  # as torch.chunk cuts
        first = min(int(coordinate[0, dimension]) * rows, shape[0])
    with torch.no_grad():
        return tensor.to_local(), shape, first


def _moments(
    state: Mapping[int, Mapping[str, object]], shapes: Mapping[str, list[int]], rank: int
) -> dict[str, object]:
    """Moments that are placed like the weights (FSDP2)."""
    parts, other = {}, {}
    for index, name in enumerate(shapes):
        for key, value in state.get(index, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                other[f"{name}/{key}"] = value
                continue
            parts[f"{name}/{key}"] = part = _part(name, value, rank)
            if part[1] != shapes[name]:
                raise CheckpointError(
                    f"its moments '{key}' number {index} have shape {part[1]}, and '{name}' has "
                    f"{shapes[name]}: they are kept in a way that is not read (use_orig_params?). {_REMEDY}"
                )
    return _rows(parts) | {"other": other}


def _flat_moments(states: Sequence[Mapping[int, Mapping[str, Any]]], shapes: Mapping[str, list[int]]) -> State:
    """Moments of flat parameters (FSDP), whole: one for what is in no decoder layer, then one for each layer."""
    units: dict[str, list[str]] = {"": []}
    for name in shapes:
        layer = _LAYER.match(name)
        units.setdefault(layer.group(1) if layer else "", []).append(name)
    units = {unit: names for unit, names in units.items() if names}
    if len(units) != len(states[0]):
        raise CheckpointError(
            f"its optimizer has {len(states[0])} flat parameters, and the model has {len(units)} units (decoder "
            f"layers, and the rest). {_REMEDY}"
        )
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    pieces: dict[str, tuple[list[Tensor], int]] = {}
    other: State = {}
    for index, names in enumerate(units.values()):
        for key in states[0][index]:
            values = [state[index][key] for state in states]
            if not isinstance(values[0], Tensor) or values[0].dim() == 0:  # the number of steps, the same on all ranks
                other |= {f"{name}/{key}": values[0] for name in names}
                continue
            total = sum(sizes[name] for name in names)
            # FSDP pads a flat parameter so that all ranks have equal parts of it.
            if {value.numel() for value in values} != {-(-total // len(values))}:
                raise CheckpointError(f"its flat moments '{key}' number {index} do not fit {total} weights. {_REMEDY}")
            start = 0
            for name in names:
                pieces[f"{name}/{key}"] = (values, start)
                start += sizes[name]
    full_shapes = {name: shapes[name.rsplit("/", 1)[0]] for name in pieces}
    return {
        "tensors": _Unflattened(pieces, full_shapes),
        "shapes": full_shapes,
        "first_rows": dict.fromkeys(full_shapes, 0),
        "other": other,
    }


class _Unflattened(Mapping[str, Tensor]):
    """Tensors cut out of flat ones that lie in equal parts on several ranks; put together when one is asked for."""

    def __init__(self, pieces: Mapping[str, tuple[list[Tensor], int]], shapes: Mapping[str, list[int]]) -> None:
        self._pieces, self._shapes = pieces, shapes

    def __getitem__(self, name: str) -> Tensor:
        parts, start = self._pieces[name]
        stop = start + torch.Size(self._shapes[name]).numel()
        size = parts[0].numel()
        ranks = range(start // size, -(-stop // size))
        cut = [parts[rank][max(start - rank * size, 0) : stop - rank * size] for rank in ranks]
        return torch.cat(cut).view(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
