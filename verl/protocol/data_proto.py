"""``DataProto``: the batch that the stages of a run pass on, each adding columns."""

from __future__ import annotations

import builtins
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from verl.base import env
from verl.base.device_copies import to_device
from verl.errors import DataError, SchemaError
from verl.protocol import files
from verl.protocol.columns import (
    Columns,
    RowIndex,
    as_column,
    columns_to_join,
    common_batch_size,
    describe,
    gather_metrics,
    listing,
    make_tensordict,
    only,
    parts_of,
    row_indices,
    take,
    union_numpy_dict,
    unite,
    whole_tensordict,
)
from verl.protocol.in_place import MethodsForScripts
from verl.protocol.stored import StoredColumn
from verl.protocol.tensor_columns import BatchAttribute, TensorColumns, concat_columns
from verl.protocol.transport import UnreadColumn, owned

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

META = "meta_info entry"
METRICS = "metrics"


class DataProtoConfig:
    """Process-wide settings for all batches.

    ``auto_padding``: dispatch may pad any batch whose length the number of ranks does not divide. Set by the
    environment variable ``VERL_AUTO_PADDING=1``.
    """

    auto_padding: bool = env.auto_padding()


@dataclass
class DataProtoItem:
    """One row of a ``DataProto``: the value of each column, without the batch dimension."""

    batch: TensorDict = field(default_factory=lambda: make_tensordict({}, []))
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto(MethodsForScripts):
    """Named columns with one row per sample, and ``meta_info`` for constants that all rows share.

    ``data.batch["responses"]`` and ``data.non_tensor_batch["uid"]`` are columns; ``data.responses`` finds either.
    ``verl/schema.py`` declares the columns that verl uses; others are the user's.

    Methods return a new object that shares unchanged columns with the old one and has its own ``meta_info`` dict. Only
    ``reorder``, ``pop``, ``union``, ``rename`` and ``padding`` work in place; they replace columns of this object and
    never write into a tensor. ``a | b`` is ``union`` into a new object.

    ``batch`` is never None: without tensor columns it is an empty ``TensorDict`` with the right number of rows. To test
    for that, use ``not data.batch.keys()``.

    Args:
        batch: tensor columns, each (bsz, ...).
        non_tensor_batch: columns of Python objects or numpy values, each (bsz, ...).
        meta_info: constants that belong to all rows, such as ``global_steps``.
        auto_padding: dispatch may pad this batch if the number of ranks does not divide its length.

    Raises:
        SchemaError: the columns do not all have the same number of rows.
    """

    batch: BatchAttribute = BatchAttribute()  # noqa: RUF009  one descriptor for the class, as dataclasses want it
    non_tensor_batch: Columns = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    auto_padding: bool = False

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()
        if len(self) != self._tensor_columns.batch_size[0]:
            self.batch = None  # no tensor columns, but as many rows as the others have

    @property
    def _tensor_columns(self) -> TensorColumns:
        return self.__dict__["batch"]

    # ---- making one ---------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | np.ndarray | list],
        meta_info: dict[str, object] | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Create from one dict: tensors go to ``batch``, arrays and lists to ``non_tensor_batch``."""
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        non_tensors = {key: value for key, value in data.items() if not isinstance(value, Tensor)}
        return cls.from_dict(tensors, non_tensors, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | list] | None = None,
        meta_info: dict[str, object] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Create from tensor columns and other columns (arrays, or lists with one value per row).

        ``num_batch_dims`` leading dimensions must be equal in all tensors.
        """
        batch = TensorColumns(common_batch_size(tensors, num_batch_dims), tensors) if tensors else None
        columns = {key: as_column(key, value) for key, value in (non_tensors or {}).items()}
        return cls(batch, columns, dict(meta_info or {}), auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDictBase | None = None,
        meta_info: dict[str, object] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """Create from a TensorDict: non-tensors with one value per row become columns, others ``meta_info``."""
        tensors, non_tensors, meta = parts_of(tensor_dict)
        return cls.from_dict(tensors, non_tensors, unite(meta, meta_info or {}, META), num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """Convert to one TensorDict; ``from_tensordict`` inverts it, giving object arrays for non-tensors."""
        return whole_tensordict(self._tensor_columns.tensors(), self.non_tensor_batch, self.meta_info, len(self))

    # ---- looking at it ------------------------------------------------------------------------

    def __len__(self) -> int:
        rows = self._tensor_columns.batch_size[0]
        if rows or self._tensor_columns.peek():
            return rows
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    if not TYPE_CHECKING:  # otherwise type checkers would accept misspelled methods

        def __getattr__(self, name: str) -> Any:
            # copy and pickle look up special methods on objects whose fields are not set yet.
            if name.startswith("__") or "meta_info" not in self.__dict__:
                raise AttributeError(name)
            if name in self._tensor_columns.peek():
                return self._tensor_columns.tensors([name])[name]
            if name in self.non_tensor_batch:
                return self.non_tensor_batch[name]
            raise AttributeError(
                f"DataProto has neither attribute nor column '{name}'; columns: {listing(self._keys())}."
            )

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: builtins.slice | RowIndex) -> DataProto: ...
    def __getitem__(self, item: int | builtins.slice | RowIndex) -> DataProto | DataProtoItem:
        """An integer gives a ``DataProtoItem``; a slice, list, array, tensor or mask gives a ``DataProto``."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            row = int(row_indices([int(item)], len(self))[0])
            values = {key: column[row] for key, column in self.non_tensor_batch.items()}
            return DataProtoItem(self.batch[row], values, dict(self.meta_info))
        return self.select_idxs(item)

    def check_consistency(self) -> None:
        """Raise ``SchemaError``, naming the column, unless all columns are dense and have the same number of rows."""
        if not self._tensor_columns.batch_size:
            raise SchemaError("batch has no batch dimension; make it with batch_size=[number of rows].")
        for key, value in self._tensor_columns.peek().items():
            if isinstance(value, UnreadColumn | StoredColumn):
                continue
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
                raise SchemaError(
                    f"column '{key}' of batch is a {type(value).__name__}; columns there are dense tensors. "
                    "Pad ragged values, flatten nested ones (flatten_keys), and put objects into non_tensor_batch."
                )
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray) or value.ndim == 0:
                raise SchemaError(
                    f"column '{key}' of non_tensor_batch is {describe(value)}; use a numpy array with one value per "
                    "row (DataProto.from_dict makes it from a list). What belongs to all rows goes to meta_info."
                )
            if len(value) != len(self):
                raise SchemaError(f"column '{key}' has {len(value)} rows, the batch has {len(self)}.")

    def _keys(self) -> list[str]:
        return [*self._tensor_columns.peek(), *self.non_tensor_batch]

    # ---- choosing columns ---------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Select columns, which must exist; None keeps all of a kind, ``[]`` none. The number of rows is kept."""
        columns = self._tensor_columns
        selection = DataProto(
            columns.select(only(columns.peek(), batch_keys, "batch")),
            only(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch"),
            only(self.meta_info, meta_info_keys, "meta_info"),
            self.auto_padding,
        )
        return copy.deepcopy(selection) if deepcopy else selection

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, object]) -> DataProto:
        columns = self._tensor_columns
        batch = TensorColumns(columns.batch_size, {key: value.clone() for key, value in columns.tensors().items()})
        non_tensors, meta_info = copy.deepcopy((self.non_tensor_batch, self.meta_info), memo)
        return DataProto(batch, non_tensors, meta_info, self.auto_padding)

    def __or__(self, other: DataProto) -> DataProto:
        """Return a new batch with the columns and the ``meta_info`` of both.

        Raises:
            SchemaError: the numbers of rows differ, or an entry of both has different values (NaN equals NaN).
        """
        if len(self) != len(other) and (self._keys() or len(self)) and (other._keys() or len(other)):
            raise SchemaError(
                f"cannot unite {len(self)} rows (columns {listing(self._keys())}) with {len(other)} rows "
                f"(columns {listing(other._keys())}): rows must correspond one to one."
            )
        if self._tensor_columns.peek() and other._tensor_columns.peek():
            batch = self._tensor_columns.union(other._tensor_columns)
        else:
            holder = other if other._tensor_columns.peek() or not len(self) else self
            batch = holder.select()._tensor_columns
        return DataProto(
            batch,
            union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch),
            unite(self.meta_info, other.meta_info, META),
            self.auto_padding or other.auto_padding,
        )

    def with_meta_info(self, meta_info: dict[str, object]) -> DataProto:
        """Return the batch with another ``meta_info``; unread columns stay unread."""
        return DataProto(self._tensor_columns, self.non_tensor_batch, meta_info, self.auto_padding)  # type: ignore[arg-type]

    def to(self, device: str | torch.device | int) -> DataProto:
        """Return the batch with its tensors on ``device``."""
        columns = self._tensor_columns
        moved = {key: to_device(value, device) for key, value in columns.tensors().items()}
        return DataProto(
            TensorColumns(columns.batch_size, moved),
            dict(self.non_tensor_batch),
            dict(self.meta_info),
            self.auto_padding,
        )

    # ---- choosing rows ------------------------------------------------------------------------

    def select_idxs(self, idxs: RowIndex) -> DataProto:
        """Select rows by index, in the given order and repeatedly if repeated, or by a boolean mask."""
        rows = row_indices(idxs, len(self))
        return self._map(lambda _, column: take(column, rows), len(rows), rows)

    def part(self, start: int, end: int) -> DataProto:
        """Select rows to send them to another process: columns that lie in Ray's object store stay there, unread."""
        return self._map(lambda _, column: column[start:end], end - start, torch.arange(start, end))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Select rows as ``[start:end:step]``; shares memory with this batch unless ``step`` is negative."""
        part = slice(start, end, step)
        rows = range(len(self))[part]
        if step is not None and step < 0:  # torch has no such views
            return self.select_idxs(rows)
        return self._map(lambda _, column: column[part], len(rows))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeat every row ``repeat_times`` times: a a b b if ``interleave``, else a b a b."""
        if repeat_times < 0:
            raise SchemaError(f"rows cannot be repeated {repeat_times} times.")
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    # ---- parts and wholes ---------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Return whether dispatch may pad this batch and ``chunk`` may return parts of unequal length."""
        return self.auto_padding or DataProtoConfig.auto_padding

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into ``chunks`` contiguous parts of equal length, which share memory with this batch.

        A length that is not divisible is a ``SchemaError``, unless padding is enabled: the first parts are then one row
        longer.
        """
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise SchemaError(
                f"{len(self)} rows do not divide into {chunks} equal chunks. Change the batch size, pad with "
                "pad_dataproto_to_divisor, or allow uneven chunks with auto_padding=True."
            )
        small, longer = divmod(len(self), chunks)
        bounds = [i * small + min(i, longer) for i in range(chunks + 1)]
        return [self.slice(start, end) for start, end in itertools.pairwise(bounds)]

    @staticmethod
    def concat(data: list[DataProto]) -> DataProto:
        """Concatenate batches along the rows and unite their ``meta_info``.

        ``metrics`` of ``meta_info``, a dict or a list of dicts in each batch, become one dict of lists, with the values
        of all batches.

        Raises:
            SchemaError: the list is empty, columns differ, or an entry of ``meta_info`` has different values: what
                differs between parts belongs in a column.
        """
        if not data:
            raise SchemaError("concat needs at least one batch.")
        meta_info: dict[str, object] = {}
        for part in data:
            meta_info = unite(meta_info, {key: part.meta_info[key] for key in part.meta_info if key != METRICS}, META)
        if metrics := [part.meta_info[METRICS] for part in data if part.meta_info.get(METRICS) is not None]:
            meta_info[METRICS] = gather_metrics(metrics)
        if len(data) == 1:
            return data[0].select().with_meta_info(meta_info)
        tensors = columns_to_join([part._tensor_columns.peek() for part in data], "tensor column")
        non_tensors = columns_to_join([part.non_tensor_batch for part in data], "non-tensor column")
        size = [sum(map(len, data)), *data[0]._tensor_columns.batch_size[1:]]
        return DataProto(
            TensorColumns(size, {key: concat_columns(parts) for key, parts in tensors.items()}),
            {key: np.concatenate(parts) for key, parts in non_tensors.items()},
            dict(meta_info),
            any(part.auto_padding for part in data),
        )

    # ---- processes and files ------------------------------------------------------------------

    def remember(self, result: object) -> None:
        """Note the reference of which this batch is the value, so that large columns travel on as references."""
        self._tensor_columns.remember(result)

    def __getstate__(self) -> dict[str, object]:
        # Flat buffers, which pickle passes on without copying; see transport.py.
        return {**self.__dict__, "batch": self._tensor_columns.wire()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Received arrays may lie in read-only memory that other processes map too.
        self.non_tensor_batch = {key: owned(column) for key, column in state["non_tensor_batch"].items()}
        if state["batch"] is None:  # from an earlier version, of a batch without tensors
            self.batch = TensorColumns([len(next(iter(self.non_tensor_batch.values()), ()))], {})
        else:
            self.batch = TensorColumns.arrived(*state["batch"])

    def save_to_disk(self, filepath: str | PathLike[str]) -> None:
        """Write to one safetensors file; ``files.py`` lists the types it can hold, others are a ``DataError``."""
        columns = self._tensor_columns
        files.write(filepath, columns.batch_size, columns.tensors(), self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(filepath: str | PathLike[str]) -> DataProto:
        """Read a file of ``save_to_disk``; never runs code from it. A damaged file is a ``DataError``."""
        size, tensors, non_tensor_batch, meta_info = files.read(filepath)
        try:
            return DataProto(None if size is None else make_tensordict(tensors, size), non_tensor_batch, meta_info)
        except (SchemaError, RuntimeError) as error:
            raise DataError(f"{filepath}: its columns do not fit together ({error}). Write the file anew.") from error

    def _map(self, change: Callable[[str, Any], Any], rows: int, row_indices: Tensor | None = None) -> DataProto:
        """Apply ``change(name, column)`` to every column; each result must have ``rows`` rows.

        If the change is to choose the rows ``taken``, stored columns are not read for it.
        """
        columns = self._tensor_columns
        stored = {k: c for k, c in columns.peek().items() if isinstance(c, StoredColumn) and row_indices is not None}
        read = columns.tensors(key for key in columns.peek() if key not in stored)
        tensors = {
            key: stored[key].take(np.asarray(row_indices)) if key in stored else change(key, read[key])
            for key in columns.peek()
        }
        non_tensors = {key: change(key, value) for key, value in self.non_tensor_batch.items()}
        return DataProto(
            TensorColumns([rows, *columns.batch_size[1:]], tensors),
            non_tensors,
            dict(self.meta_info),
            self.auto_padding,
        )
