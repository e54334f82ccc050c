"""Functions on batches: collate rows, replace or derive columns, pad and unpad, fold and unfold the batch dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional

from verl.errors import SchemaError
from verl.protocol.columns import ColumnT
from verl.protocol.data_proto import DataProto, DataProtoItem


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """Join rows with equal columns and ``meta_info``: tensors are stacked, other values become object columns."""
    return DataProto.concat(
        [
            DataProto.from_dict(
                {key: value.unsqueeze(0) for key, value in item.batch.items()},
                {key: [value] for key, value in item.non_tensor_batch.items()},
                item.meta_info,
            )
            for item in x
        ]
    )


def replace_columns(batch: DataProto, columns: DataProto) -> DataProto:
    """Return ``batch`` with ``columns`` added or overwritten, where ``batch | columns`` would refuse to overwrite."""
    replaced = columns._tensor_columns.peek().keys()
    remaining = batch.select(
        batch_keys=[key for key in batch._tensor_columns.peek() if key not in replaced],
        non_tensor_batch_keys=[key for key in batch.non_tensor_batch if key not in columns.non_tensor_batch],
    )
    return remaining | columns


def fill_column(parts: Sequence[DataProto], name: str, value: Callable[[torch.dtype], float]) -> list[DataProto]:
    """Give parts of one batch that lack the tensor column ``name`` the one that another part has, filled.

    Args:
        parts: batches that will be concatenated.
        name: of the column; where no part has it, nothing changes.
        value: the value everywhere, by dtype.
    """
    columns = [part._tensor_columns.peek().get(name) for part in parts]
    template = next((column for column in columns if column is not None), None)
    if template is None:
        return list(parts)
    shape, dtype = template.shape[1:], template.dtype
    return [
        part
        if column is not None
        else part | DataProto.from_dict({name: torch.full((len(part), *shape), value(dtype), dtype=dtype)})
        for part, column in zip(parts, columns, strict=True)
    ]


def widen_column(parts: Sequence[DataProto], name: str, value: float) -> list[DataProto]:
    """Give the tensor column ``name`` of all parts of one batch the largest last dimension of any, filled at the end.

    Args:
        parts: batches that will be concatenated.
        name: of the column, which all parts have, or none.
        value: stands in new places.
    """
    widths = [column.shape[-1] for part in parts if (column := part._tensor_columns.peek().get(name)) is not None]
    if len(set(widths)) <= 1:
        return list(parts)
    wide = []
    for part, width in zip(parts, widths, strict=True):
        column = functional.pad(part.batch[name], (0, max(widths) - width), value=value)
        wide.append(replace_columns(part, DataProto.from_dict({name: column})) if width < max(widths) else part)
    return wide


def with_equal_columns(parts: Sequence[DataProto]) -> list[DataProto]:
    """Add columns of objects that some parts of a batch lack, filled with None."""
    names = {name for part in parts for name in part.non_tensor_batch}
    empty = [
        {name: np.full(len(part), None, dtype=object) for name in names - part.non_tensor_batch.keys()}
        for part in parts
    ]
    return [part | DataProto.from_dict(non_tensors=columns) for part, columns in zip(parts, empty, strict=True)]


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """Slice the attention mask of the responses; (bsz, response_length).

    Raises:
        SchemaError: the batch has no ``responses`` or no ``attention_mask``.
    """
    if missing := [name for name in ("responses", "attention_mask") if name not in data.batch.keys()]:
        raise SchemaError(
            f"the response mask is attention_mask at the tokens of responses, and the batch has no "
            f"{' and no '.join(missing)}; it has: {', '.join(sorted(data.batch.keys()))}."
        )
    attention_mask = data.batch["attention_mask"]
    prompt_length = attention_mask.size(1) - data.batch["responses"].size(1)
    return attention_mask[:, prompt_length:]  # not [:, -response_length:], which would take all for length 0


def response_lengths(batch: DataProto) -> torch.Tensor:
    """Number of tokens of each response, including tool outputs; (bsz,)."""
    return compute_response_mask(batch).sum(-1)


def prompt_lengths(batch: DataProto) -> torch.Tensor:
    """Number of tokens of each prompt; (bsz,)."""
    return batch.batch["attention_mask"].sum(-1) - response_lengths(batch)


def with_response_mask(data: DataProto) -> DataProto:
    """Add ``response_mask`` if the batch has none: 1 on all tokens of the response, as if the policy chose them all."""
    if "response_mask" in data.batch.keys():
        return data
    return data | DataProto.from_dict(tensors={"response_mask": compute_response_mask(data)})


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows at the end until ``size_divisor`` divides the length; return the batch and the number added.

    Padding repeats the batch's own rows from the first on, so that it is valid input. An empty batch stays empty.
    Undone by ``unpad_dataproto``.
    """
    if size_divisor < 1:
        raise SchemaError(f"a batch cannot be padded to a multiple of {size_divisor}; use a positive number.")
    length = len(data)
    pad_size = -length % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(length + pad_size) % length), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise SchemaError(f"cannot remove {pad_size} rows of padding from a batch of {len(data)} rows.")
    return data.slice(end=len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape every column (bsz, ...) to (new_bsz, bsz / new_bsz, ...); ``new_batch_size`` must divide bsz."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise SchemaError(f"{len(data)} rows do not fold into {new_batch_size}; use a divisor.")
    return _reshape(data, 1, lambda _: (new_batch_size, len(data) // new_batch_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the first ``batch_dims`` dimensions of every column: (b1, b2, ..., rest) to (b1·b2·..., rest)."""
    return _reshape(data, batch_dims, lambda old: (math.prod(old),))


def _reshape(data: DataProto, old_dims: int, new: Callable[[tuple[int, ...]], tuple[int, ...]]) -> DataProto:
    def reshaped(value: ColumnT) -> ColumnT:
        return value.reshape(*new(tuple(value.shape[:old_dims])), *value.shape[old_dims:])

    tensors = {key: reshaped(value) for key, value in data.batch.items()}
    non_tensors = {key: reshaped(value) for key, value in data.non_tensor_batch.items()}
    return DataProto.from_dict(
        tensors, non_tensors, data.meta_info, num_batch_dims=len(new((len(data),))), auto_padding=data.auto_padding
    )
