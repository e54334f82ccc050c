"""Columns as flat buffers, so that crossing a process costs no copy that can be avoided.

A tensor travels as its bytes in a one-dimensional uint8 array. From protocol 5 on, pickle hands
such arrays over *out of band*, without copying them; Ray writes them once into its object store.
The byte view makes this work for dtypes that numpy lacks (bfloat16, float8).

On arrival the array may lie in read-only memory that other processes map as well. Torch has no
read-only tensors, so a write into such a view would change the batch of every other reader. A
received column in read-only memory is therefore copied when it is first asked for (``received.py``),
and is then the receiver's own; a buffer that is already private (a plain pickle) is adopted as it is.
The copy also lets go of the object store, which could otherwise not free the batch.

What arrives lies on the CPU, contiguous and without gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from verl.protocol.received import ReceivedBatch, ReceivedColumn, WireTensor, flat
from verl.protocol.tensordicts import make_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDict

WireTensorDict = tuple[tuple[int, ...], dict[str, WireTensor]]
"""batch size, columns."""


def serialize_single_tensor(obj: Tensor) -> WireTensor:
    """dtype name, shape and bytes of a tensor; shares memory with a contiguous one on the CPU."""
    dense = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return str(dense.dtype).removeprefix("torch."), tuple(dense.shape), flat(dense).view(torch.uint8).numpy()


def deserialize_single_tensor(arr: WireTensor) -> Tensor:
    """The tensor of ``serialize_single_tensor``, in memory that is safe to write to."""
    return ReceivedColumn(arr).tensor()


def serialize_tensordict(batch: TensorDict) -> WireTensorDict:
    """Batch size, and each column as ``serialize_single_tensor`` gives it."""
    return serialize_columns(tuple(batch.batch_size), cast("Mapping[str, Tensor]", batch))


def serialize_columns(batch_size: tuple[int, ...], columns: Mapping[str, Tensor | ReceivedColumn]) -> WireTensorDict:
    """As ``serialize_tensordict``; columns that arrived and were not read are passed on as they came."""
    return batch_size, {
        key: column.wire if isinstance(column, ReceivedColumn) else serialize_single_tensor(column)
        for key, column in columns.items()
    }


def deserialize_tensordict(arr: WireTensorDict) -> TensorDict:
    """The TensorDict of ``serialize_tensordict``."""
    received = ReceivedBatch(*arr)
    return make_tensordict(received.tensors(), received.batch_size)
