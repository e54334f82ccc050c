"""Tensor columns of a batch that has just arrived: read where they lie, copied when they are asked for.

What another process sent may lie in memory that more processes map, such as Ray's object store. Torch
has no read-only tensors, so nobody gets a tensor there: each column is copied, once, when it is first
asked for. Columns that nobody reads are never copied; those that are only joined to others are read in
place, and the join is their copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

WireTensor = tuple[str, tuple[int, ...], np.ndarray]
"""dtype name, shape, bytes."""
PiecesOfTensor = tuple[str, tuple[int, ...], list[np.ndarray]]
"""The same with its bytes in several buffers, one behind the other; see ``wire.py``."""


class ReceivedColumn:
    """One tensor, as the bytes that arrived.

    Args:
        wire: what ``serialize_single_tensor`` or ``in_pieces`` made.
    """

    def __init__(self, wire: WireTensor | PiecesOfTensor) -> None:
        name, shape, data = wire
        self._pieces = [data] if isinstance(data, np.ndarray) else data
        self.wire = wire
        self.dtype: torch.dtype = getattr(torch, name)
        self.shape = torch.Size(shape)

    @property
    def is_private(self) -> bool:
        """Whether the bytes belong to this process alone, so that they may be the tensor's memory."""
        return all(piece.flags.writeable for piece in self._pieces)

    def tensor(self) -> Tensor:
        """The tensor: the bytes themselves if they are private, else a copy."""
        (first, *others) = self._pieces
        return _tensor(owned(first), self.dtype, self.shape) if not others else self.concat([self])

    @staticmethod
    def concat(columns: Sequence[ReceivedColumn]) -> Tensor:
        """Tensors of one dtype, equal but for their first dimension, one below the other: one pass over the bytes."""
        pieces = [piece for column in columns for piece in column._pieces]
        whole = np.empty(sum(map(len, pieces)), np.uint8)
        start = 0
        for piece in pieces:
            whole[start : start + len(piece)] = piece
            start += len(piece)
        rows = sum(column.shape[0] for column in columns)
        return _tensor(whole, columns[0].dtype, torch.Size([rows, *columns[0].shape[1:]]))

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}"


class ReceivedBatch:
    """Tensor columns with a common batch size, of which each becomes a tensor when it is asked for.

    Threads may ask at the same time; all get the same tensors.

    Args:
        batch_size: first dimensions of all columns.
        columns: what ``serialize_single_tensor`` or ``in_pieces`` made of each.
    """

    def __init__(self, batch_size: tuple[int, ...], columns: Mapping[str, WireTensor | PiecesOfTensor]) -> None:
        self.batch_size = batch_size
        self._columns: dict[str, Tensor | ReceivedColumn] = {key: ReceivedColumn(c) for key, c in columns.items()}
        self._reading = threading.Lock()

    @property
    def is_private(self) -> bool:
        """Whether all bytes belong to this process alone."""
        return all(isinstance(column, Tensor) or column.is_private for column in self._columns.values())

    def peek(self) -> dict[str, Tensor | ReceivedColumn]:
        """The columns as they are now."""
        return dict(self._columns)

    def tensors(self, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Some columns as tensors, all for None; the same ones each time, so that a write is seen by all who asked."""
        with self._reading:
            return {key: self._tensor(key) for key in (self._columns if keys is None else keys)}

    def _tensor(self, key: str) -> Tensor:
        column = self._columns[key]
        if isinstance(column, ReceivedColumn):
            column = self._columns[key] = column.tensor()
        return column


def owned(array: np.ndarray) -> np.ndarray:
    """The array itself if it may be written to, else a copy."""
    return array if array.flags.writeable else array.copy()


def flat(dense: Tensor) -> Tensor:
    """A contiguous tensor in one dimension."""
    # With one element or none, a contiguous tensor may have any stride; a view as another dtype needs 1.
    return dense.as_strided((dense.numel(),), (1,))


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return flat(torch.from_numpy(data)).view(dtype).view(shape)
