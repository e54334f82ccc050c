"""The tensor columns of a batch: tensors, received bytes that nobody has read yet, columns in Ray's object store."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, cast, overload

import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.protocol.columns import make_tensordict, unite
from verl.protocol.stored import MIN_BYTES, Origin, StoredColumn, fetch_together, travels_by_reference
from verl.protocol.transport import (
    PiecesOfTensor,
    UnreadColumn,
    WireTensor,
    in_pieces,
    serialize_single_tensor,
    tensors_of,
)

if TYPE_CHECKING:
    from collections.abc import ItemsView, KeysView, ValuesView

    from tensordict import TensorDict

    class TensorsOnly(TensorDict):  # type: ignore[misc]
        """Type of ``DataProto.batch`` for type checkers: keys are strings, values are tensors."""

        def keys(self) -> KeysView[str]: ...  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride]
        def items(self) -> ItemsView[str, Tensor]: ...  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride]
        def values(self) -> ValuesView[Tensor]: ...  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride]


Column = Tensor | UnreadColumn | StoredColumn
OnTheWire = WireTensor | PiecesOfTensor | StoredColumn


class TensorColumns:
    """The tensor columns of a ``DataProto``, some of them possibly received and not read yet.

    They become a ``TensorDict`` on first request and live in it from then on. Thread-safe: concurrent readers get the
    same tensors.
    """

    def __init__(self, batch_size: Sequence[int], columns: Mapping[str, Column]) -> None:
        self._batch_size = tuple(batch_size)
        self._columns = dict(columns)
        self._tensordict: TensorDict | None = None
        self._stored: dict[str, StoredColumn] = {}
        self._reading = threading.Lock()

    @classmethod
    def from_tensordict(cls, tensordict: TensorDict) -> TensorColumns:
        """Wrap a ``TensorDict``; both see later changes of either."""
        columns = cls((), {})
        columns._tensordict = tensordict
        return columns

    @classmethod
    def arrived(cls, batch_size: Sequence[int], columns: Mapping[str, OnTheWire]) -> TensorColumns:
        """Unpickle: the counterpart of :meth:`wire`."""
        return cls(
            batch_size, {key: c if isinstance(c, StoredColumn) else UnreadColumn(c) for key, c in columns.items()}
        )

    def remember(self, result: object) -> None:
        """Note that these columns are those of ``result``, a reference in Ray's object store; see :mod:`.stored`."""
        with self._reading:
            unread = {key: column for key, column in self._columns.items() if isinstance(column, UnreadColumn)}
            if sum(column.shape.numel() * column.dtype.itemsize for column in unread.values()) >= MIN_BYTES:
                for key, column in unread.items():
                    origin = Origin.from_result(result, key, column.shape[0])
                    self._columns[key] = StoredColumn(origin, column.dtype, column.shape, [column])

    @property
    def batch_size(self) -> tuple[int, ...]:
        """Leading dimensions that all columns share."""
        return self._batch_size if self._tensordict is None else tuple(self._tensordict.batch_size)

    def peek(self) -> dict[str, Column]:
        """Return the columns as they are now, without reading unread ones."""
        with self._reading:
            if self._tensordict is None:
                return dict(self._columns)
            return {key: self._with_origin(key, tensor) for key, tensor in tensors_of(self._tensordict).items()}

    def _with_origin(self, key: str, tensor: Tensor) -> Column:
        """Return the stored column of which ``tensor`` is the unchanged value, else the tensor."""
        stored = self._stored.get(key)
        return stored if stored is not None and stored.is_as_stored and stored.tensor() is tensor else tensor

    def tensors(self, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the named columns (None: all) as tensors; each call returns the same tensor objects."""
        with self._reading:
            if self._tensordict is not None:
                tensors = tensors_of(self._tensordict)
                return tensors if keys is None else {key: tensors[key] for key in keys}
            selected = {key: self._columns[key] for key in (self._columns if keys is None else keys)}
            fetch_together(column for column in selected.values() if isinstance(column, StoredColumn))
            read: dict[str, Tensor] = {}
            for key, column in selected.items():
                read[key] = column if isinstance(column, Tensor) else column.tensor()
                if isinstance(column, UnreadColumn):
                    self._columns[key] = read[key]
            return read

    def tensordict(self) -> TensorDict:
        """Return all columns as a ``TensorDict``, the same object on each call."""
        if self._tensordict is None:
            tensors = self.tensors()
            with self._reading:
                if self._tensordict is None:
                    self._tensordict = make_tensordict(tensors, self._batch_size)
                    self._stored = {key: c for key, c in self._columns.items() if isinstance(c, StoredColumn)}
                    self._columns = {}
        return self._tensordict

    def select(self, keys: Iterable[str]) -> TensorColumns:
        """Choose columns; both objects share their tensors, also those of stored columns that nobody has read yet."""
        columns, names = self.peek(), list(keys)
        read = self.tensors(key for key in names if not isinstance(columns[key], StoredColumn))
        return TensorColumns(self.batch_size, {key: read.get(key, columns[key]) for key in names})

    def union(self, other: TensorColumns) -> TensorColumns:
        """Return the columns of both; a column of both must have equal values. Stored columns are not read for it."""
        if self.batch_size != other.batch_size:
            raise SchemaError(
                f"cannot unite tensors of batch size {self.batch_size} with tensors of batch size {other.batch_size}: "
                "rows must correspond one to one."
            )
        own_columns, other_columns = self.peek(), other.peek()
        both = [key for key in own_columns if key in other_columns and own_columns[key] is not other_columns[key]]
        unite(self.tensors(both), other.tensors(both), "column")
        united, added = self.select(own_columns), other.select(key for key in other_columns if key not in own_columns)
        return TensorColumns(self.batch_size, united.peek() | added.peek())

    def wire(self) -> tuple[tuple[int, ...], dict[str, OnTheWire]]:
        """Return batch size and columns for pickle; unread columns are passed on as they came."""
        return self.batch_size, {key: _on_the_wire(column) for key, column in self.peek().items()}


def _on_the_wire(column: Column) -> OnTheWire:
    if isinstance(column, UnreadColumn):
        return column.wire
    if isinstance(column, StoredColumn):
        if travels_by_reference() and column.is_unchanged():
            return column
        column = column.tensor()
    return in_pieces(serialize_single_tensor(column))


def concat_columns(parts: Sequence[Column]) -> Tensor | StoredColumn:
    """Concatenate along the rows; received columns are read in place, stored ones not at all, where all parts are."""
    if all(isinstance(part, StoredColumn) and part.is_unchanged() for part in parts):
        return StoredColumn.concat(cast("Sequence[StoredColumn]", parts))
    if all(isinstance(part, UnreadColumn) for part in parts):
        return UnreadColumn.concat(cast("Sequence[UnreadColumn]", parts))
    return torch.cat([part if isinstance(part, Tensor) else part.tensor() for part in parts])


class BatchAttribute:
    """Descriptor of ``DataProto.batch``: presents the stored ``TensorColumns`` as a ``TensorDict``."""

    @overload
    def __get__(self, data: None, owner: object = None) -> None: ...
    @overload
    def __get__(self, data: object, owner: object = None) -> TensorsOnly: ...
    def __get__(self, data: object | None, owner: object = None) -> TensorDict | None:
        return None if data is None else vars(data)["batch"].tensordict()

    def __set__(self, data: object, batch: TensorDict | TensorColumns | None) -> None:
        if batch is None:  # the batch keeps its rows; when it is made it has none yet
            batch = TensorColumns([len(cast(Sized, data)) if "batch" in vars(data) else 0], {})
        vars(data)["batch"] = batch if isinstance(batch, TensorColumns) else TensorColumns.from_tensordict(batch)
