"""Checkpoint files whose ranks hold boxes of weights: some rows, some columns, or both.

::

    {local_path}/
      megatron_config.json                   {"world_size": W, ...}
      model_world_size_{W}_rank_{R}.pt       boxes of weights, under the names and in the shapes of Transformers
      optim_world_size_{W}_rank_{R}.pt       the same boxes of the optimizer's state, and its step counts
      extra_state_world_size_{W}_rank_{R}.pt schedule, random states, weight version, step
      huggingface/                           config, tokenizer; safetensors if "hf_model" is saved

No name, shape or order in the files depends on how many ranks wrote them or what they shared, so any layout of ranks
reads what any other wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.checkpoint.locate import LAYOUT_FILE
from verl.checkpoint.shards import FORMAT, read_state, shard_file
from verl.errors import CheckpointError

if TYPE_CHECKING:
    from verl.checkpoint.states import State

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Index of the first element in each dimension, and the sizes."""


def write_layout(folder: Path, world_size: int, layout: Mapping[str, int]) -> None:
    """Record how many ranks write into ``folder``, and what they share; call on one rank."""
    (folder / LAYOUT_FILE).write_text(json.dumps({"world_size": world_size, **layout}))


def saved_ranks(folder: Path) -> int:
    """Read the number of ranks that wrote ``folder``; a missing or damaged file is a ``CheckpointError``."""
    path = folder / LAYOUT_FILE
    try:
        ranks = json.loads(path.read_text())["world_size"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing, so {folder} is not a complete checkpoint of strategy=megatron. Convert a "
            "checkpoint of another strategy to a Hugging Face folder: verl merge."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if type(ranks) is not int or ranks < 1:
        raise CheckpointError(f"{path} is damaged: world_size={ranks!r:.80} is no number of ranks.")
    return ranks


@dataclass(frozen=True)
class StoredBox:
    """One box of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    values: Tensor


def boxes_state(boxes: Sequence[StoredBox], copied: bool) -> dict[str, object]:
    """Collect boxes as the content of a ``.pt`` file."""
    entries = [
        {"name": box.name, "shape": list(box.shape), "start": list(box.start), "values": _compact(box.values, copied)}
        for box in boxes
    ]
    return {"format": FORMAT, "boxes": entries}


def _compact(values: Tensor, copied: bool) -> Tensor:
    """Return the box on the CPU in memory of its own size, copied if need be or if ``copied``."""
    # torch.save stores the whole storage of a view, here the tensor that the box was cut from.
    values = values.detach()
    is_whole = values.is_contiguous() and values.untyped_storage().nbytes() == values.numel() * values.element_size()
    return values.to("cpu", copy=True) if copied or not is_whole else values.cpu()


class Boxes:
    """The boxes of all ranks of a checkpoint, from which any box can be cut.

    Args:
        states: contents of the files of one kind, as :func:`boxes_state` made them.
        source: named in error messages.
    """

    def __init__(self, states: Sequence[State], source: str) -> None:
        self.source = source
        self.states = states
        self._stored: dict[str, list[StoredBox]] = {}
        for state in states:
            for entry in _entries(state, source):
                self._stored.setdefault(entry.name, []).append(entry)

    @classmethod
    def read(cls, folder: Path, kind: str) -> Boxes:
        """Read one kind of file of every rank; tensors are memory-mapped until they are cut."""
        ranks = saved_ranks(folder)
        return cls([read_state(folder / shard_file(kind, ranks, rank)) for rank in range(ranks)], f"{folder} ({kind})")

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor ``name``."""
        return self._stored[name][0].shape

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ``CheckpointError`` unless the tensors are those of ``shapes``."""
        missing, unknown = sorted(shapes.keys() - self._stored.keys()), sorted(self._stored.keys() - shapes.keys())
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint {self.source} is of another model: missing weights "
                f"{missing[:3] or 'none'}, unknown weights {unknown[:3] or 'none'}."
            )
        for name, shape in shapes.items():
            if invalid := [box.shape for box in self._stored[name] if box.shape != tuple(shape)]:
                raise CheckpointError(
                    f"'{name}' has shape {list(invalid[0])} in the checkpoint {self.source} and {list(shape)} here."
                )

    def cut(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Copy one box of the tensor ``name`` out of the boxes of all ranks.

        Raises:
            CheckpointError: they lack some of its elements.
        """
        stored = self._stored[name]
        result = torch.empty(tuple(size), dtype=stored[0].values.dtype)
        filled = torch.zeros(tuple(size), dtype=torch.bool)
        for box in stored:
            parts = overlap(box.start, box.values.shape, start, size)
            if parts is not None:
                source_part, result_part = parts
                result[result_part] = box.values[source_part]
                filled[result_part] = True
        if not bool(filled.all()):
            raise CheckpointError(f"the files of the checkpoint {self.source} do not contain all parts of '{name}'.")
        return result


def overlap(
    start: Sequence[int], size: Sequence[int], other_start: Sequence[int], other_size: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of two boxes as slices of each of them; None if there is none."""
    slices, other_slices = [], []
    for first, count, other_first, other_count in zip(start, size, other_start, other_size, strict=True):
        begin, end = max(first, other_first), min(first + count, other_first + other_count)
        if begin >= end:
            return None
        slices.append(slice(begin - first, end - first))
        other_slices.append(slice(begin - other_first, end - other_first))
    return tuple(slices), tuple(other_slices)


def _entries(state: Mapping[str, object], source: str) -> list[StoredBox]:
    """Validate the content of a file; its shapes decide how much memory reading takes."""
    entries = state.get("boxes")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{source} is damaged: a file holds no boxes of weights.")
    boxes = []
    for entry in entries:
        name, shape, start, values = (entry.get(key) for key in ("name", "shape", "start", "values"))
        if not isinstance(name, str) or not _is_box(shape, start, values):
            raise CheckpointError(f"{source} is damaged: '{name}' is no box of a tensor of shape {shape!r:.80}.")
        boxes.append(StoredBox(name, tuple(shape), tuple(start), values))
    return boxes


def _is_box(shape: object, start: object, values: object) -> bool:
    """Return whether ``values`` lie within ``shape`` at ``start``; false for a view that is expanded."""
    if not isinstance(values, Tensor) or not isinstance(shape, list) or not isinstance(start, list):
        return False
    if not values.dim() == len(shape) == len(start):
        return False
    if any(type(size) is not int or size < 0 for size in (*shape, *start)):
        return False
    if values.untyped_storage().nbytes() < values.numel() * values.element_size():
        return False
    return all(first + count <= full for first, count, full in zip(start, values.shape, shape, strict=True))
