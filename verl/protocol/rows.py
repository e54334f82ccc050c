"""Rows to a batch, batches with other columns, and batches whose rows are grouped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from verl.errors import SchemaError
from verl.protocol.data_proto import DataProto, DataProtoItem


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """The batch of these rows: tensors are stacked, other values become object columns.

    Raises:
        SchemaError: there are no rows, or they do not have the same columns and ``meta_info``.
    """
    return DataProto.concat([_single(item) for item in x])


def _single(item: DataProtoItem) -> DataProto:
    tensors = {key: value.unsqueeze(0) for key, value in item.batch.items()} if item.batch is not None else {}
    others = {key: [value] for key, value in item.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, others, item.meta_info)


def replace_columns(batch: DataProto, columns: DataProto) -> DataProto:
    """A new batch: ``batch`` with the columns of ``columns`` in place of its own of the same name.

    Where ``batch | columns`` refuses two columns that differ, this takes those of ``columns``.
    """
    tensors = () if batch.batch is None else batch.batch.keys()
    replaced = () if columns.batch is None else set(columns.batch.keys())
    kept = batch.select(
        batch_keys=[key for key in tensors if key not in replaced],
        non_tensor_batch_keys=[key for key in batch.non_tensor_batch if key not in columns.non_tensor_batch],
    )
    return kept | columns


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Every column (bsz, ...) as (new_bsz, bsz / new_bsz, ...): consecutive rows become one.

    Raises:
        SchemaError: ``new_batch_size`` does not divide the number of rows.
    """
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise SchemaError(f"{len(data)} rows do not fold into {new_batch_size}; use a divisor.")
    return _reshape(data, 1, lambda _: (new_batch_size, len(data) // new_batch_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Every column (b1, b2, ..., rest) as (b1·b2·..., rest), over the first ``batch_dims`` dimensions."""
    return _reshape(data, batch_dims, lambda old: (math.prod(old),))


def _reshape(data: DataProto, old_dims: int, new: Callable[[tuple[int, ...]], tuple[int, ...]]) -> DataProto:
    def reshaped(value: Any) -> Any:
        return value.reshape(*new(tuple(value.shape[:old_dims])), *value.shape[old_dims:])

    tensors = {key: reshaped(value) for key, value in data.batch.items()} if data.batch is not None else {}
    others = {key: reshaped(value) for key, value in data.non_tensor_batch.items()}
    return DataProto.from_dict(
        tensors, others, data.meta_info, num_batch_dims=len(new((len(data),))), auto_padding=data.auto_padding
    )
