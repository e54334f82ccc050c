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

Ray copies a buffer of more than 1 MiB into its store with six threads. On fewer cores they wait for each
other, and a batch in smaller buffers is there sooner (``benchmarks/dataproto_transfer.py``); so there a
column is pickled in pieces.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from verl.protocol.received import PiecesOfTensor, ReceivedBatch, ReceivedColumn, WireTensor, flat
from verl.protocol.tensordicts import make_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDict

WireTensorDict = tuple[tuple[int, ...], dict[str, WireTensor]]
"""batch size, columns."""
RAY_THREADS = 6
"""How many threads Ray copies a long buffer with."""
LONG = 2**20
"""Bytes of the longest buffer that it copies with one."""


def serialize_single_tensor(obj: Tensor) -> WireTensor:
    """dtype name, shape and bytes of a tensor; shares memory with a contiguous one on the CPU."""
    dense = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return str(dense.dtype).removeprefix("torch."), tuple(dense.shape), flat(dense).view(torch.uint8).numpy()


def deserialize_single_tensor(arr: WireTensor) -> Tensor:
    """The tensor of ``serialize_single_tensor``, in memory that is safe to write to."""
    return ReceivedColumn(arr).tensor()


def serialize_tensordict(batch: TensorDict) -> WireTensorDict:
    """Batch size, and each column as ``serialize_single_tensor`` gives it."""
    columns = cast("Mapping[str, Tensor]", batch)
    return tuple(batch.batch_size), {key: serialize_single_tensor(column) for key, column in columns.items()}


def serialize_columns(
    batch_size: tuple[int, ...], columns: Mapping[str, Tensor | ReceivedColumn]
) -> tuple[tuple[int, ...], dict[str, WireTensor | PiecesOfTensor]]:
    """For pickle: as ``serialize_tensordict``, in pieces; columns that arrived and were not read go on as they came."""
    return batch_size, {
        key: column.wire if isinstance(column, ReceivedColumn) else in_pieces(serialize_single_tensor(column))
        for key, column in columns.items()
    }


def in_pieces(wire: WireTensor) -> WireTensor | PiecesOfTensor:
    """The tensor in the buffers that reach Ray's store soonest on a machine with as many cores as this one."""
    name, shape, data = wire
    if len(data) <= LONG or (os.cpu_count() or 1) >= RAY_THREADS:
        return wire
    return name, shape, [data[start : start + LONG] for start in range(0, len(data), LONG)]


def deserialize_tensordict(arr: WireTensorDict) -> TensorDict:
    """The TensorDict of ``serialize_tensordict``."""
    received = ReceivedBatch(*arr)
    return make_tensordict(received.tensors(), received.batch_size)
