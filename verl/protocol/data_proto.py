"""``DataProto``: the batch that every stage takes and adds columns to."""

from __future__ import annotations

import builtins
import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from verl.errors import DataError, SchemaError
from verl.protocol import files
from verl.protocol.columns import (
    Columns,
    RowIndex,
    as_column,
    concat_columns,
    describe,
    listing,
    only,
    row_indices,
    take,
    union_numpy_dict,
    unite,
)
from verl.protocol.padding import DataProtoConfig
from verl.protocol.received import ReceivedBatch, ReceivedColumn, owned
from verl.protocol.tensordicts import (
    make_tensordict,
    parts_of,
    tensordict_of,
    union_tensor_dict,
    whole_tensordict,
)
from verl.protocol.wire import serialize_columns

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

logger = logging.getLogger(__name__)

META = "meta_info entry"


@dataclass
class DataProtoItem:
    """One row of a ``DataProto``: each column's value there, without the batch dimension."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """Named columns with one row per sample, and constants of the run beside them.

    ``data.batch["responses"]`` and ``data.non_tensor_batch["uid"]`` are columns; ``data.responses``
    finds either. The columns that verl knows are declared in ``verl/schema.py``; others are the user's.

    Methods return a new object, which shares unchanged columns with the old one and has a
    ``meta_info`` dict of its own. The exceptions are those that users know as in place: ``reorder``,
    ``pop``, ``union``, ``rename`` and ``padding``. They replace columns of this object and never
    write into a tensor. ``a | b`` is ``union`` into a new object.

    There may be no columns at all, or only non-tensor ones.

    Args:
        batch: tensor columns, each (bsz, ...).
        non_tensor_batch: columns of Python objects or numpy values, each (bsz, ...).
        meta_info: constants that belong to all rows, such as ``global_steps``.
        auto_padding: dispatch may pad this batch if it does not divide over the ranks.

    Raises:
        SchemaError: the columns do not all have the same number of rows.
    """

    # Typed as present, as it nearly always is; a batch without tensors has None. The default comes from a
    # function so that the class has no such attribute: a batch that has just arrived makes it when it is read.
    batch: TensorDict = field(default_factory=lambda: None)  # pyright: ignore[reportAssignmentType]
    non_tensor_batch: Columns = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    auto_padding: bool = False

    def __post_init__(self) -> None:
        self.check_consistency()

    # ---- making one ---------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | np.ndarray | list],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """From one dict of columns: tensors go to ``batch``, arrays and lists to ``non_tensor_batch``."""
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        others: dict[str, Any] = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | list] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """From columns of tensors, and columns of other values: arrays, or lists with one value per row.

        Args:
            tensors: columns of ``batch``.
            non_tensors: columns of ``non_tensor_batch``.
            meta_info: entries that belong to all rows.
            num_batch_dims: how many leading dimensions all tensors share.
            auto_padding: dispatch may pad this batch if it does not divide over the ranks.

        Raises:
            SchemaError: a column has another number of rows than the others, or is neither of these.
        """
        batch = tensordict_of(tensors, num_batch_dims) if tensors else None
        columns = {key: as_column(key, value) for key, value in (non_tensors or {}).items()}
        return cls(batch, columns, dict(meta_info or {}), auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDictBase | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """From a TensorDict: non-tensors with one value per row become columns, others ``meta_info``."""
        tensors, non_tensors, found = parts_of(tensor_dict)
        return cls.from_dict(tensors, non_tensors, unite(found, meta_info or {}, META), num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """All of it in one TensorDict; ``from_tensordict`` undoes it, with arrays of objects for non-tensors."""
        return whole_tensordict(dict(self._tensors()), self.non_tensor_batch, self.meta_info, len(self))

    # ---- looking at it ------------------------------------------------------------------------

    def __len__(self) -> int:
        size = self._batch_size()
        if size is not None:
            return size[0]
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    if not TYPE_CHECKING:  # a type checker should go on to find misspelled methods

        def __getattr__(self, name: str) -> Any:
            """``data.<column>`` is the column, wherever it is kept."""
            # Copying and unpickling ask objects that have no fields yet for special methods.
            if name.startswith("__") or "meta_info" not in self.__dict__:
                raise AttributeError(name)
            if name == "batch":
                return self._take_in()
            if name in self._peek():
                received = self._received()
                return self.batch[name] if received is None else received.tensors([name])[name]
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
        """``data[3]`` is a ``DataProtoItem``; a slice, list, array, tensor or mask gives a ``DataProto``."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            row = int(row_indices([int(item)], len(self))[0])
            values = {key: column[row] for key, column in self.non_tensor_batch.items()}
            return DataProtoItem(None if self.batch is None else self.batch[row], values, dict(self.meta_info))
        return self.select_idxs(item)

    def check_consistency(self) -> None:
        """Make sure that every column is a tensor or an array, and that all have the same rows.

        Raises:
            SchemaError: they do not; the message names the column.
        """
        if self.batch is not None and not self.batch.batch_size:
            raise SchemaError("batch has no batch dimension; make it with batch_size=[number of rows].")
        for key, value in self._tensors():
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

    def get_data_info(self) -> str:
        """Its columns with dtypes and shapes, one a line, then the entries of ``meta_info``."""
        lines = [f"batch {key}: {describe(value)}" for key, value in self._tensors()]
        lines += [f"non_tensor_batch {key}: {describe(value)}" for key, value in self.non_tensor_batch.items()]
        lines += [f"meta_info {key}: {describe(value)}" for key, value in self.meta_info.items()]
        return "\n".join([f"{len(self)} rows", *lines])

    def print_size(self, prefix: str = "") -> str:
        """Log how much memory the columns take (objects count as their references alone), and return the line."""
        tensors = sum(value.nbytes for _, value in self._tensors())
        others = sum(column.nbytes for column in self.non_tensor_batch.values())
        line = f"{prefix}{' ' if prefix else ''}{len(self)} rows: tensors {tensors:,} bytes, others {others:,} bytes"
        logger.info("%s", line)
        return line

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [] if self.batch is None else list(self.batch.items())

    def _keys(self) -> list[str]:
        return [*self._peek(), *self.non_tensor_batch]

    # ---- as it arrived from another process: columns stay where they lie until they are read ---------

    def _received(self) -> ReceivedBatch | None:
        if "batch" not in self.__dict__:
            return self.__dict__.get("_arrived")
        # What the user put in its place may be here beside it.
        self.__dict__.pop("_arrived", None)
        return None

    def _take_in(self) -> TensorDict:
        # Another thread may do the same: the first batch stays, and takes the place of what arrived.
        received = self.__dict__.get("_arrived")
        if received is not None:
            self.__dict__.setdefault("batch", make_tensordict(received.tensors(), received.batch_size))
            self.__dict__.pop("_arrived", None)
        return self.__dict__["batch"]

    def _peek(self) -> dict[str, Tensor | ReceivedColumn]:
        received = self._received()
        return dict(self._tensors()) if received is None else received.peek()

    def _batch_size(self) -> tuple[int, ...] | None:
        received = self._received()
        if received is not None:
            return received.batch_size
        return None if self.batch is None else tuple(self.batch.batch_size)

    # ---- choosing columns ---------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Some of the columns; None keeps all of a kind, ``[]`` none of it. The number of rows stays known.

        Raises:
            SchemaError: a named column does not exist.
        """
        received, keys = self._received(), only(self._peek(), batch_keys, "batch")
        tensors = dict(self._tensors()) if received is None else received.tensors(keys)
        chosen = DataProto(
            self._with_tensors({key: tensors[key] for key in keys}),
            only(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch"),
            only(self.meta_info, meta_info_keys, "meta_info"),
            self.auto_padding,
        )
        return copy.deepcopy(chosen) if deepcopy else chosen

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        batch = None if self.batch is None else self.batch.clone()
        others, meta_info = copy.deepcopy((self.non_tensor_batch, self.meta_info), memo)
        return DataProto(batch, others, meta_info, self.auto_padding)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take columns out of this batch, in place, and return them as another; None takes none of a kind.

        Raises:
            SchemaError: a named column does not exist.
        """
        taken = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        self.batch = self._with_tensors({k: v for k, v in self._tensors() if k not in (batch_keys or [])})
        self.non_tensor_batch = {k: v for k, v in self.non_tensor_batch.items() if k not in taken.non_tensor_batch}
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in taken.meta_info}
        return taken

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> DataProto:
        """Give tensor columns other names, in place; returns this batch.

        Raises:
            SchemaError: the lists differ in length, a column does not exist, or a new name is taken.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or [])
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or [])
        if len(old) != len(new):
            raise SchemaError(f"rename needs one new name for each old one, got {old} and {new}.")
        tensors = dict(self._tensors())
        only(tensors, old, "batch")
        names = [dict(zip(old, new, strict=True)).get(key, key) for key in tensors]
        if len(set(names)) < len(names):
            raise SchemaError(f"renaming {old} to {new} gives two columns one name; columns: {listing(tensors)}.")
        self.batch = self._with_tensors(dict(zip(names, tensors.values(), strict=True)))
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and the ``meta_info`` of ``other``, in place; returns this batch.

        Raises:
            SchemaError: the numbers of rows differ, or both have an entry and its values differ (NaN
                equals NaN). Nothing is changed then.
        """
        united = self | other
        self.batch, self.non_tensor_batch, self.meta_info = united.batch, united.non_tensor_batch, united.meta_info
        return self

    def __or__(self, other: DataProto) -> DataProto:
        """``a | b``: a new batch with the columns of both; see ``union``."""
        if self._keys() and other._keys() and len(self) != len(other):
            raise SchemaError(
                f"cannot unite {len(self)} rows (columns {listing(self._keys())}) with {len(other)} rows "
                f"(columns {listing(other._keys())}): rows must correspond one to one."
            )
        batch = (self if other.batch is None else other).select().batch
        if self.batch is not None and other.batch is not None:
            batch = union_tensor_dict(self.batch, other.batch)
        return DataProto(
            batch,
            union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch),
            unite(self.meta_info, other.meta_info, META),
            self.auto_padding or other.auto_padding,
        )

    def to(self, device: str | torch.device | int) -> DataProto:
        """The batch with its tensors on ``device``."""
        moved = self.select()
        moved.batch = self._with_tensors({key: value.to(device) for key, value in self._tensors()})
        return moved

    # ---- choosing rows ------------------------------------------------------------------------

    def select_idxs(self, idxs: RowIndex) -> DataProto:
        """The rows with these numbers, in this order, repeatedly if named repeatedly; or those of a mask."""
        rows = row_indices(idxs, len(self))
        return self._map(lambda _, column: take(column, rows), len(rows))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """The rows from ``start`` up to ``end``; shares memory with this batch."""
        part = slice(start, end, step)
        rows = range(len(self))[part]
        if step is not None and step < 0:  # torch has no such views
            return self.select_idxs(rows)
        return self._map(lambda _, column: column[part], len(rows))

    def reorder(self, indices: RowIndex) -> None:
        """Put the rows in this order, in place: row ``indices[i]`` becomes row ``i``.

        Raises:
            SchemaError: ``indices`` does not name every row once; ``select_idxs`` can drop or repeat rows.
        """
        rows = row_indices(indices, len(self))
        if sorted(rows.tolist()) != list(range(len(self))):
            raise SchemaError(
                f"reorder needs each of the {len(self)} rows once, got {len(rows)} indices "
                f"({len(set(rows.tolist()))} different). To drop or repeat rows use select_idxs."
            )
        ordered = self.select_idxs(rows)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times`` times: a a b b if ``interleave``, else a b a b."""
        if repeat_times < 0:
            raise SchemaError(f"rows cannot be repeated {repeat_times} times.")
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """Row ``i`` ``repeat_times[i]`` times, copies next to each other."""
        times = torch.as_tensor(repeat_times)
        if times.shape != (len(self),):
            raise SchemaError(f"repeat_times needs one count for each of {len(self)} rows, got {describe(times)}.")
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times.long().cpu()))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Columns (bsz, n·k, ...) to (bsz·n, k, ...): ``n_split`` pieces of a row become rows of their own.

        Columns that are not in ``split_keys`` are repeated, ``n_split`` times each row.

        Raises:
            SchemaError: a column's second dimension does not divide by ``n_split``.
        """
        columns = {**dict(self._tensors()), **self.non_tensor_batch}
        split = only(columns, split_keys or [], "the batch")
        for key, column in split.items():
            if column.ndim < 2 or column.shape[1] % n_split:
                raise SchemaError(f"column '{key}' {tuple(column.shape)} does not split into {n_split} pieces a row.")
        rows = torch.arange(len(self)).repeat_interleave(n_split)

        def pieces(key: str, column: Any) -> Any:
            if key not in split:
                return take(column, rows)
            return column.reshape(len(rows), column.shape[1] // n_split, *column.shape[2:])

        return self._map(pieces, len(rows))

    # ---- parts and wholes ---------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Whether dispatch may pad this batch, or ``chunk`` make parts of unequal length."""
        return self.auto_padding or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Add copies of a row at the end, in place.

        Args:
            padding_size: how many copies.
            padding_candidate: ``"first"`` or ``"last"`` row; empty means the last.

        Raises:
            SchemaError: there is no row to copy, or ``padding_candidate`` is something else.
        """
        if padding_size < 0 or padding_candidate not in ("", "first", "last"):
            raise SchemaError(
                f"padding takes a number of rows and 'first' or 'last', got {padding_size} and '{padding_candidate}'."
            )
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.select_idxs([*range(len(self)), *[row] * padding_size])
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` contiguous parts of equal length, which share memory with this batch.

        With padding enabled the length need not divide: the first parts are then one row longer.

        Raises:
            SchemaError: the length does not divide, and padding is not enabled.
        """
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise SchemaError(
                f"{len(self)} rows do not divide into {chunks} equal chunks. Change the batch size, pad with "
                "pad_dataproto_to_divisor, or allow uneven chunks with auto_padding=True."
            )
        small, longer = divmod(len(self), chunks)
        bounds = [i * small + min(i, longer) for i in range(chunks + 1)]
        return [self.slice(start, end) for start, end in itertools.pairwise(bounds)]

    def split(self, split_size: int) -> list[DataProto]:
        """Contiguous parts of ``split_size`` rows, the last one possibly shorter; they share memory."""
        if split_size < 1:
            raise SchemaError(f"split_size must be a positive number of rows, got {split_size}.")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: list[DataProto]) -> DataProto:
        """The rows of all, one batch after the other. ``meta_info`` is united.

        Raises:
            SchemaError: there is none, their columns differ, or an entry of ``meta_info`` has
                different values: what differs between parts belongs into a column.
        """
        if not data:
            raise SchemaError("concat needs at least one batch.")
        meta_info = data[0].meta_info
        for part in data[1:]:
            meta_info = unite(meta_info, part.meta_info, META)
        if len(data) == 1:
            return data[0].select()
        tensors = concat_columns([part._peek() for part in data], "tensor column")
        columns = concat_columns([part.non_tensor_batch for part in data], "non-tensor column")
        size = next((size for size in (part._batch_size() for part in data) if size is not None), None)
        batch = None if size is None else make_tensordict(tensors, [sum(map(len, data)), *size[1:]])
        return DataProto(batch, columns, dict(meta_info), any(part.auto_padding for part in data))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of this batch, ``epochs`` times over.

        Args:
            mini_batch_size: rows of each; must divide the number of rows.
            epochs: how often every row comes.
            seed: of the order, where ``dataloader_kwargs`` asks for ``shuffle=True``.
            dataloader_kwargs: further arguments of ``torch.utils.data.DataLoader``.

        Raises:
            SchemaError: ``mini_batch_size`` does not divide the number of rows.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise SchemaError(f"mini_batch_size={mini_batch_size} does not divide the batch of {len(self)} rows.")
        loader: Any = DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            **(dataloader_kwargs or {}),
        )
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    # ---- processes and files ------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Tensors as flat buffers, which pickle hands over without a copy; see ``wire.py``."""
        size = self._batch_size()
        wire = None if size is None else serialize_columns(size, self._peek())
        others = {key: value for key, value in self.__dict__.items() if key != "_arrived"}
        return {**others, "batch": wire}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Columns are the receiver's own: writing to them reaches no other process; see ``received.py``."""
        wire = state["batch"]
        self.__dict__.update({key: value for key, value in state.items() if key != "batch"})
        self.non_tensor_batch = {key: owned(column) for key, column in state["non_tensor_batch"].items()}
        if wire is None:
            self.batch = None  # pyright: ignore[reportAttributeAccessIssue]
            return
        arrived = self._arrived = ReceivedBatch(*wire)
        if arrived.is_private:
            self._take_in()

    def save_to_disk(self, filepath: str | PathLike[str]) -> None:
        """Write it to one file of data alone; see ``files.py`` for what it can hold.

        Raises:
            DataError: a value cannot be stored; the message names its column and type.
        """
        size = None if self.batch is None else tuple(self.batch.batch_size)
        files.write(filepath, size, dict(self._tensors()), self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(filepath: str | PathLike[str]) -> DataProto:
        """Read what ``save_to_disk`` wrote. No code of the file is ever run.

        Raises:
            DataError: the file is missing, damaged, or of another kind.
        """
        size, tensors, non_tensor_batch, meta_info = files.read(filepath)
        try:
            return DataProto(None if size is None else make_tensordict(tensors, size), non_tensor_batch, meta_info)
        except (SchemaError, RuntimeError) as error:
            raise DataError(f"{filepath}: its columns do not fit together ({error}). Write the file anew.") from error

    # ---- helpers ------------------------------------------------------------------------------

    def _with_tensors(self, tensors: dict[str, Any]) -> TensorDict | None:
        size = self._batch_size()
        return None if size is None else make_tensordict(tensors, size)

    def _map(self, change: Callable[[str, Any], Any], rows: int) -> DataProto:
        """``change(name, column)`` of every column; each result has ``rows`` rows."""
        batch = None
        if self.batch is not None:
            tensors = {key: change(key, value) for key, value in self._tensors()}
            batch = make_tensordict(tensors, [rows, *self.batch.batch_size[1:]])
        columns = {key: change(key, value) for key, value in self.non_tensor_batch.items()}
        return DataProto(batch, columns, dict(self.meta_info), self.auto_padding)
