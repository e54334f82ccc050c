"""Move tensor columns between processes as flat byte buffers, with as few copies as possible.

Sending: a tensor becomes a one-dimensional uint8 array. With protocol 5 pickle passes such arrays *out of band*,
without copying, and Ray writes them once into its object store. The view as bytes also serves dtypes that numpy lacks
(bfloat16, float8).

Receiving: the bytes may lie in read-only memory that other processes map too. Torch has no read-only tensors, so a
write would change the batch of every reader. A column is therefore copied once, when it is first read; unread columns
are never copied, columns that are only concatenated are read in place, and a buffer that is already private (from a
plain pickle) is used as it is. The copy also releases the object store's memory.

Received tensors lie on the CPU, contiguous and without gradient.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from verl.protocol.columns import is_tensordict, make_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDict


WireTensor = tuple[str, tuple[int, ...], np.ndarray]
"""(dtype name, shape, bytes)."""
PiecesOfTensor = tuple[str, tuple[int, ...], list[np.ndarray]]
"""A ``WireTensor`` whose bytes are split over consecutive buffers."""
WireColumn = tuple[str, tuple[int, ...], Any]
"""A ``WireTensor``; or what a column that is no dense tensor consists of."""
WireTensorDict = tuple[tuple[int, ...], str | None, dict[str, WireColumn]]
"""(batch size, device of all columns or None, columns)."""
RAY_THREADS = 6
"""Threads with which Ray copies a buffer of more than 1 MiB into its store."""
LONG = 2**20
"""Bytes of the longest buffer that Ray copies with a single thread."""


# ---- one tensor -----------------------------------------------------------------------------------


def serialize_single_tensor(obj: Tensor) -> WireTensor:
    """Return dtype name, shape and bytes; the bytes share memory with a contiguous CPU tensor."""
    dense = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return str(dense.dtype).removeprefix("torch."), tuple(dense.shape), _flat(dense).view(torch.uint8).numpy()


def deserialize_single_tensor(arr: WireTensor) -> Tensor:
    """Invert ``serialize_single_tensor``; the tensor is safe to write to."""
    return UnreadColumn(arr).tensor()


def in_pieces(wire: WireTensor) -> WireTensor | PiecesOfTensor:
    """Split a long tensor into buffers of at most 1 MiB on machines with fewer cores than Ray's copy threads."""
    # Below that number the threads wait for each other, and small buffers, which Ray copies with one thread each,
    # arrive sooner (measured by benchmarks/dataproto_transfer.py).
    name, shape, data = wire
    if len(data) <= LONG or (os.cpu_count() or 1) >= RAY_THREADS:
        return wire
    return name, shape, [data[start : start + LONG] for start in range(0, len(data), LONG)]


class UnreadColumn:
    """A received tensor that has not been read yet; holds its bytes in the form of :func:`in_pieces`."""

    def __init__(self, wire: WireTensor | PiecesOfTensor) -> None:
        name, shape, data = wire
        self._pieces = [data] if isinstance(data, np.ndarray) else data
        self.wire = wire
        self.dtype: torch.dtype = getattr(torch, name)
        self.shape = torch.Size(shape)

    def tensor(self) -> Tensor:
        """Return the tensor, over the received bytes themselves if this process alone owns them, else copied."""
        (first, *further) = self._pieces
        return _tensor(owned(first), self.dtype, self.shape) if not further else self.concat([self])

    @staticmethod
    def concat(columns: Sequence[UnreadColumn]) -> Tensor:
        """Concatenate along the first dimension in one pass over the bytes; dtypes and other dimensions must agree."""
        pieces = [piece for column in columns for piece in column._pieces]
        joined = np.empty(sum(map(len, pieces)), np.uint8)
        start = 0
        for piece in pieces:
            joined[start : start + len(piece)] = piece
            start += len(piece)
        rows = sum(column.shape[0] for column in columns)
        return _tensor(joined, columns[0].dtype, torch.Size([rows, *columns[0].shape[1:]]))

    def bytes(self) -> np.ndarray:
        """Return all bytes as one array, which may be read-only."""
        return self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}"


def owned(array: np.ndarray) -> np.ndarray:
    """The array itself if it may be written to, else a copy."""
    return array if array.flags.writeable else array.copy()


def _flat(dense: Tensor) -> Tensor:
    # With one element or none, a contiguous tensor may have any stride; a view as another dtype needs 1.
    return dense.as_strided((dense.numel(),), (1,))


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return _flat(torch.from_numpy(data)).view(dtype).view(shape)


# ---- all tensors of a TensorDict ----------------------------------------------------------------


def serialize_tensordict(batch: TensorDict) -> WireTensorDict:
    """Return batch size, device and serialized columns.

    A column may also be a TensorDict, a nested tensor or no tensor; these have a name of their own in the place
    of the dtype's.
    """
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, {key: _serialize(column) for key, column in batch.items()}


def deserialize_tensordict(arr: WireTensorDict) -> TensorDict:
    """Invert ``serialize_tensordict``; the columns lie on the CPU."""
    batch_size, device, columns = arr
    tensordict = make_tensordict({key: _deserialize(column) for key, column in columns.items()}, batch_size)
    return tensordict if device is None else tensordict.to("cpu")


NESTED, JAGGED, STRIDED, OTHER = "tensordict", "jagged", "strided", "object"
"""Names of columns that are no dense tensors, as of dtypes."""


def _serialize(column: object) -> WireColumn:
    if is_tensordict(column):
        return NESTED, tuple(column.batch_size), serialize_tensordict(column)
    if not isinstance(column, Tensor):
        return OTHER, (), column
    if column.is_nested:
        if column.layout != torch.jagged:
            return STRIDED, (column.size(0),), [serialize_single_tensor(row) for row in column.unbind()]
        jagged: Any = column
        parts = {"values": jagged.values(), "offsets": jagged.offsets(), "lengths": jagged.lengths()}
        sent = {name: serialize_single_tensor(part) for name, part in parts.items() if part is not None}
        return JAGGED, (column.size(0),), sent
    return serialize_single_tensor(column)


def _deserialize(column: WireColumn) -> object:
    kind, _, content = column
    if kind == NESTED:
        return deserialize_tensordict(content)
    if kind == OTHER:
        return content
    if kind == JAGGED:
        parts: dict[str, Any] = {name: deserialize_single_tensor(part) for name, part in content.items()}
        return torch.nested.nested_tensor_from_jagged(**parts)
    if kind == STRIDED:
        return torch.nested.as_nested_tensor([deserialize_single_tensor(row) for row in content])
    return deserialize_single_tensor(column)


def tensors_of(batch: TensorDict) -> dict[str, Tensor]:
    """Return the tensors of a TensorDict by name."""
    return dict(cast("Mapping[str, Tensor]", batch).items())
