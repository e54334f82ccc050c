"""Between ``DataProto``'s parts and the containers of torch: TensorDict, DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.data import DataLoader

from verl.errors import SchemaError
from verl.protocol.columns import Columns, describe

T = TypeVar("T")


def tensordict_of(tensors: Mapping[str, Tensor], num_batch_dims: int) -> TensorDict:
    """The columns as a TensorDict whose batch size is their common ``num_batch_dims`` first dimensions.

    Raises:
        SchemaError: a value is no tensor, or the first dimensions differ.
    """
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise SchemaError(
                f"column '{key}' is a {type(value).__name__}, not a tensor; give it as one of non_tensors."
            )
    sizes = {tuple(value.shape[:num_batch_dims]) for value in tensors.values()}
    if len(sizes) > 1 or len(next(iter(sizes))) < num_batch_dims:
        raise SchemaError(
            f"all columns need the same first {num_batch_dims} dimension(s), got "
            f"{', '.join(f'{key}: {describe(value)}' for key, value in sorted(tensors.items()))}."
        )
    return TensorDict(dict(tensors), batch_size=list(sizes.pop()))


def parts_of(tensor_dict: TensorDictBase | None) -> tuple[dict[str, Tensor], dict[str, list], dict[str, Any]]:
    """Tensors, non-tensors with a value per row, and non-tensors that belong to the whole."""
    tensors: dict[str, Tensor] = {}
    per_row: dict[str, list] = {}
    shared: dict[str, Any] = {}
    if tensor_dict is None:
        return tensors, per_row, shared
    for key in tensor_dict.keys():
        value = tensor_dict.get(key)
        if isinstance(value, NonTensorStack):
            per_row[key] = value.tolist()
        elif isinstance(value, NonTensorData):
            shared[key] = value.data
        else:
            tensors[key] = value
    return tensors, per_row, shared


def whole_tensordict(
    tensors: Mapping[str, Tensor], columns: Columns, shared: Mapping[str, Any], batch_size: Sequence[int]
) -> TensorDict:
    """What ``parts_of`` takes apart."""
    whole = TensorDict(dict(tensors), batch_size=list(batch_size))
    for key, column in columns.items():
        whole.set(key, NonTensorStack(*[NonTensorData(value) for value in column]))
    for key, value in shared.items():
        whole.set_non_tensor(key, value)
    return whole


def mini_batches(
    rows: int,
    take: Callable[[list[int]], T],
    size: int,
    epochs: int,
    seed: int | None,
    dataloader_kwargs: dict[str, Any] | None,
) -> Iterator[T]:
    """``take`` of ``size`` row numbers at a time, in a DataLoader's order."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader: Any = DataLoader(
        range(rows),  # type: ignore[arg-type]
        batch_size=size,
        collate_fn=take,
        generator=generator,
        **(dataloader_kwargs or {}),
    )
    for _ in range(epochs):
        yield from loader
