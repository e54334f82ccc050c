"""Columns that lie in Ray's object store, inside the results of the worker calls that made them.

The driver passes such a column on as references and row numbers, and the receiving rank reads its rows where they lie:

    rank 0 ─► result 0 ─┐                          ┌─► rank 0: rows 3, 0 of (result 1, result 0)
    rank 1 ─► result 1 ─┴─► driver: order of rows ─┴─► rank 1: rows 2, 1 of (result 1, result 0)

The driver owns the results, so they outlive the rank that made them; they are lost with the node on which they lie,
which Ray reports as a lost object and recovery as a lost process.

A column whose tensor was written to in this process is no longer what lies in the store, and travels by value. torch
counts its own writes; those of others, through ``tensor.numpy()`` or ``tensor.data``, change the tensor's sum.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from verl.protocol.transport import UnreadColumn

MIN_BYTES = 2**17
"""Smaller results travel by value: those below 100 KiB Ray keeps in the driver's memory anyway."""

NEVER = -1

_travel = threading.local()


@contextmanager
def by_reference() -> Iterator[None]:
    """Pickle stored columns as references in the block; elsewhere their values are pickled.

    The block must only pickle what Ray sends, since Ray counts who still needs an object.
    """
    _travel.by_reference = True
    try:
        yield
    finally:
        _travel.by_reference = False


def travels_by_reference() -> bool:
    """Return whether the current thread is in a block of :func:`by_reference`."""
    return getattr(_travel, "by_reference", False)


@dataclass(frozen=True)
class Origin:
    """Location of each row of a column: the result that has it, and the row of its column ``name``."""

    results: tuple[object, ...]
    """References to results of worker calls, each a ``DataProto``."""
    names: tuple[str, ...]
    """Name of the column in each result."""
    result: np.ndarray
    """(rows,) index into ``results``."""
    row: np.ndarray
    """(rows,) row of that result."""

    @classmethod
    def from_result(cls, result: object, name: str, rows: int) -> Origin:
        """All rows of one result."""
        return cls((result,), (name,), np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32))

    def take(self, rows: np.ndarray) -> Origin:
        """Choose rows, and keep the results that have some of them."""
        used, result = np.unique(self.result[rows], return_inverse=True)
        results, names = zip(*((self.results[i], self.names[i]) for i in used), strict=True) if len(used) else ((), ())
        return Origin(results, names, result.astype(np.int32), self.row[rows])

    def is_whole(self, lengths: Sequence[int]) -> bool:
        """Return whether these are all rows of results with columns of ``lengths`` rows, in their order."""
        if len(self.row) != sum(lengths):
            return False
        ordered = np.concatenate([np.arange(length) for length in lengths]) if lengths else self.row
        return np.array_equal(self.row, ordered) and np.array_equal(
            self.result, np.repeat(np.arange(len(lengths)), lengths)
        )

    @staticmethod
    def concat(origins: Sequence[Origin]) -> Origin:
        """The rows of several columns, one after the other."""
        starts = np.cumsum([0, *(len(origin.results) for origin in origins)])
        return Origin(
            tuple(result for origin in origins for result in origin.results),
            tuple(name for origin in origins for name in origin.names),
            np.concatenate([o.result + np.int32(start) for o, start in zip(origins, starts[:-1], strict=True)]),
            np.concatenate([origin.row for origin in origins]),
        )


class StoredColumn:
    """A column with its :class:`Origin`; its tensor is made when it is first asked for.

    Args:
        origin: where its rows lie.
        dtype, shape: of the whole column.
        parts: the columns of ``origin.results`` as this process has them already; None fetches them when needed.
    """

    def __init__(
        self,
        origin: Origin,
        dtype: torch.dtype,
        shape: Sequence[int],
        parts: Sequence[UnreadColumn] | None = None,
    ) -> None:
        self.origin = origin
        self.dtype, self.shape = dtype, torch.Size(shape)
        self._parts = parts
        self._chosen_from: tuple[StoredColumn, np.ndarray] | None = None
        self._tensor: Tensor | None = None
        self._version = 0
        self._sum = 0
        self._reading = threading.Lock()

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def was_read(self) -> bool:
        """True if this process holds the tensor."""
        return self._tensor is not None

    @property
    def is_as_stored(self) -> bool:
        """True if torch has not written to the tensor, or to a view of it, since it was read."""
        return self._tensor is None or (self._version != NEVER and self._tensor._version == self._version)

    def is_unchanged(self) -> bool:
        """Return whether the tensor is as it was read, by comparing all of its bytes."""
        return self._tensor is None or (self.is_as_stored and _sum(self._tensor) == self._sum)

    def tensor(self) -> Tensor:
        """Return the tensor, the same object on each call, over memory of this process."""
        with self._reading:
            if self._tensor is None:
                self._hold(self._gathered())
            assert self._tensor is not None
            return self._tensor

    def _hold(self, tensor: Tensor) -> None:
        # Tensors of inference mode do not count writes, so they never count as unchanged.
        self._version, self._sum = NEVER if tensor.is_inference() else tensor._version, _sum(tensor)
        self._tensor = tensor
        self._parts = self._chosen_from = None

    @property
    def _is_here(self) -> bool:
        """True if the tensor can be made without fetching anything."""
        source = self._chosen_from
        return self.was_read or self._parts is not None or (source is not None and source[0].is_unchanged())

    def _gathered(self) -> Tensor:
        if self._chosen_from is not None and self._chosen_from[0].is_unchanged():
            column, rows = self._chosen_from
            return column.tensor()[torch.from_numpy(rows)]
        if self._parts is None:
            fetch_together([self])
        parts, lengths = self._parts or [], [part.shape[0] for part in self._parts or ()]
        if self.origin.is_whole(lengths):
            return UnreadColumn.concat(parts)
        rows_bytes = np.empty((self.shape[0], self._row_bytes), np.uint8)
        for part_index, part in enumerate(parts):
            mine = np.flatnonzero(self.origin.result == part_index)
            rows_bytes[mine] = part.bytes().reshape(part.shape[0], self._row_bytes)[self.origin.row[mine]]
        return torch.from_numpy(rows_bytes.reshape(-1)).view(self.dtype).view(self.shape)

    @property
    def _row_bytes(self) -> int:
        return self.shape[1:].numel() * self.dtype.itemsize

    def take(self, rows: np.ndarray) -> StoredColumn | Tensor:
        """Choose rows: without reading them, unless the tensor was written to."""
        if not self.is_unchanged():
            return self.tensor()[torch.from_numpy(rows)]
        selection = StoredColumn(self.origin.take(rows), self.dtype, [len(rows), *self.shape[1:]])
        if self._tensor is not None:  # in memory already, which is cheaper than fetching it again
            selection._chosen_from = self, rows
        elif self._parts is not None:
            used = np.unique(self.origin.result[rows])
            selection._parts = [self._parts[i] for i in used]
        return selection

    @staticmethod
    def concat(columns: Sequence[StoredColumn]) -> StoredColumn:
        """Concatenate along the rows, without reading any; all must be as stored."""
        rows = sum(column.shape[0] for column in columns)
        joined = StoredColumn(
            Origin.concat([c.origin for c in columns]), columns[0].dtype, [rows, *columns[0].shape[1:]]
        )
        if all(column._parts is not None for column in columns):
            joined._parts = [part for column in columns for part in column._parts or ()]
        return joined

    def __getstate__(self) -> dict[str, object]:
        return {"origin": self.origin, "dtype": self.dtype, "shape": tuple(self.shape)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}"


def fetch_together(columns: Iterable[StoredColumn]) -> None:
    """Fetch what the columns need from the store, each result once, for the tensors that will be asked for."""
    waiting = [column for column in columns if not column._is_here]
    results = list({result: None for column in waiting for result in column.origin.results})
    if results:
        ray = sys.modules["ray"]  # where there are references, Ray is loaded
        values = dict(zip(results, ray.get(results), strict=True))
        for column in waiting:
            names = zip(column.origin.results, column.origin.names, strict=True)
            column._parts = [values[result]._tensor_columns.peek()[name] for result, name in names]


def _sum(tensor: Tensor) -> int:
    """A checksum of the bytes; about a fifth of the time of a copy."""
    return xxhash.xxh3_64_intdigest(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
