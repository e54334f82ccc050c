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
import threading
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import torch
from torch import Tensor

from verl.protocol.columns import make_tensordict

if TYPE_CHECKING:
    from collections.abc import ItemsView, KeysView, ValuesView

    from tensordict import TensorDict

    class TensorsOnly(TensorDict):  # type: ignore[misc]
        """Type of ``DataProto.batch`` for type checkers: keys are strings, values are tensors."""

        def keys(self) -> KeysView[str]: ...  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride]
        def items(self) -> ItemsView[str, Tensor]: ...  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride]
        def values(self) -> ValuesView[Tensor]: ...  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride]


WireTensor = tuple[str, tuple[int, ...], np.ndarray]
"""(dtype name, shape, bytes)."""
PiecesOfTensor = tuple[str, tuple[int, ...], list[np.ndarray]]
"""A ``WireTensor`` whose bytes are split over consecutive buffers."""
WireTensorDict = tuple[tuple[int, ...], dict[str, WireTensor]]
"""(batch size, columns)."""
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
        (first, *others) = self._pieces
        return _tensor(owned(first), self.dtype, self.shape) if not others else self.concat([self])

    @staticmethod
    def concat(columns: Sequence[UnreadColumn]) -> Tensor:
        """Concatenate along the first dimension in one pass over the bytes; dtypes and other dimensions must agree."""
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


def concat_tensors(parts: Sequence[Tensor | UnreadColumn]) -> Tensor:
    """Concatenate along the first dimension; unread columns are read in place where all parts are unread."""
    if all(isinstance(part, UnreadColumn) for part in parts):
        return UnreadColumn.concat(cast("Sequence[UnreadColumn]", parts))
    return torch.cat([part.tensor() if isinstance(part, UnreadColumn) else part for part in parts])


def owned(array: np.ndarray) -> np.ndarray:
    """The array itself if it may be written to, else a copy."""
    return array if array.flags.writeable else array.copy()


def _flat(dense: Tensor) -> Tensor:
    # With one element or none, a contiguous tensor may have any stride; a view as another dtype needs 1.
    return dense.as_strided((dense.numel(),), (1,))


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return _flat(torch.from_numpy(data)).view(dtype).view(shape)


# ---- the tensor columns of a batch ----------------------------------------------------------------


def serialize_tensordict(batch: TensorDict) -> WireTensorDict:
    """Return batch size and serialized columns."""
    return tuple(batch.batch_size), {key: serialize_single_tensor(column) for key, column in _items(batch).items()}


def deserialize_tensordict(arr: WireTensorDict) -> TensorDict:
    """Invert ``serialize_tensordict``."""
    return TensorColumns.arrived(*arr).tensordict()


class TensorColumns:
    """The tensor columns of a ``DataProto``, some of them possibly received and not read yet.

    They become a ``TensorDict`` on first request and live in it from then on. Thread-safe: concurrent readers get the
    same tensors.
    """

    def __init__(self, batch_size: Sequence[int], columns: Mapping[str, Tensor | UnreadColumn]) -> None:
        self._batch_size = tuple(batch_size)
        self._columns = dict(columns)
        self._tensordict: TensorDict | None = None
        self._reading = threading.Lock()

    @classmethod
    def of(cls, tensordict: TensorDict) -> TensorColumns:
        """Wrap a ``TensorDict``; both see later changes of either."""
        columns = cls((), {})
        columns._tensordict = tensordict
        return columns

    @classmethod
    def arrived(cls, batch_size: Sequence[int], columns: Mapping[str, WireTensor | PiecesOfTensor]) -> TensorColumns:
        """Unpickle: the counterpart of :meth:`wire`."""
        return cls(batch_size, {key: UnreadColumn(column) for key, column in columns.items()})

    @property
    def batch_size(self) -> tuple[int, ...]:
        """Leading dimensions that all columns share."""
        return self._batch_size if self._tensordict is None else tuple(self._tensordict.batch_size)

    def peek(self) -> dict[str, Tensor | UnreadColumn]:
        """Return the columns as they are now, without reading unread ones."""
        with self._reading:
            return dict(self._columns if self._tensordict is None else cast("Mapping", self._tensordict).items())

    def tensors(self, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the named columns (None: all) as tensors; each call returns the same tensor objects."""
        with self._reading:
            if self._tensordict is not None:
                found = _items(self._tensordict)
                return found if keys is None else {key: found[key] for key in keys}
            for key in self._columns if keys is None else keys:
                column = self._columns[key]
                if isinstance(column, UnreadColumn):
                    self._columns[key] = column.tensor()
            read = cast("dict[str, Tensor]", self._columns)
            return {key: read[key] for key in (self._columns if keys is None else keys)}

    def tensordict(self) -> TensorDict:
        """Return all columns as a ``TensorDict``, the same object on each call."""
        if self._tensordict is None:
            tensors = self.tensors()
            with self._reading:
                if self._tensordict is None:
                    self._tensordict = make_tensordict(tensors, self._batch_size)
                    self._columns = {}
        return self._tensordict

    def wire(self) -> tuple[tuple[int, ...], dict[str, WireTensor | PiecesOfTensor]]:
        """Return batch size and columns for pickle; unread columns are passed on as they came."""
        return self.batch_size, {
            key: column.wire if isinstance(column, UnreadColumn) else in_pieces(serialize_single_tensor(column))
            for key, column in self.peek().items()
        }


def _items(batch: TensorDict) -> dict[str, Tensor]:
    return dict(cast("Mapping[str, Tensor]", batch).items())


class BatchAttribute:
    """Descriptor of ``DataProto.batch``: presents the stored ``TensorColumns`` as a ``TensorDict``."""

    @overload
    def __get__(self, data: None, owner: Any = None) -> None: ...
    @overload
    def __get__(self, data: object, owner: Any = None) -> TensorsOnly: ...
    def __get__(self, data: object | None, owner: Any = None) -> TensorDict | None:
        return None if data is None else vars(data)["batch"].tensordict()

    def __set__(self, data: object, batch: TensorDict | TensorColumns | None) -> None:
        if batch is None:  # the batch keeps its rows; when it is made it has none yet
            batch = TensorColumns([len(cast(Sized, data)) if "batch" in vars(data) else 0], {})
        vars(data)["batch"] = batch if isinstance(batch, TensorColumns) else TensorColumns.of(batch)
