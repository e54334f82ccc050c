"""Methods of ``DataProto`` for users' scripts, most of them in place; verl itself does not call them.

verl's own code creates new batches instead (``select``, ``select_idxs``, ``slice``, ``|``, ``concat``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from verl.errors import SchemaError
from verl.protocol.columns import Columns, ColumnT, RowIndex, describe, listing, only, row_indices, take
from verl.protocol.tensor_columns import BatchAttribute, TensorColumns

logger = logging.getLogger(__name__)


class BatchLike(Protocol):
    """The part of ``DataProto`` that the methods below use; this module cannot import ``DataProto``, its subclass."""

    batch: BatchAttribute
    non_tensor_batch: Columns
    meta_info: dict[str, Any]

    @property
    def _tensor_columns(self) -> TensorColumns: ...

    def __len__(self) -> int: ...

    def __or__(self: T, other: T) -> T: ...

    def select(self: T, batch_keys: object, non_tensor_batch_keys: object, meta_info_keys: object) -> T:
        """Select columns."""
        ...

    def select_idxs(self: T, idxs: RowIndex) -> T:
        """Select rows."""
        ...

    def slice(self: T, start: int, end: int) -> T:
        """Select contiguous rows."""
        ...

    def _map(self: T, change: Callable[[str, Any], object], rows: int) -> T: ...


T = TypeVar("T", bound=BatchLike)


class MethodsForScripts:
    """Mixin of ``DataProto`` with these methods."""

    # ---- in place -----------------------------------------------------------------------------

    def pop(
        self: T,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> T:
        """Remove columns in place, which must exist, and return them as a new batch; None removes none of a kind."""
        removed = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        columns = self._tensor_columns
        remaining = {key: value for key, value in columns.peek().items() if key not in (batch_keys or [])}
        self.batch = TensorColumns(columns.batch_size, remaining)
        self.non_tensor_batch = {k: v for k, v in self.non_tensor_batch.items() if k not in removed.non_tensor_batch}
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in removed.meta_info}
        return removed

    def rename(self: T, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None) -> T:
        """Rename tensor columns in place, pairwise, to names that are not taken; returns this batch."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or [])
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or [])
        if len(old) != len(new):
            raise SchemaError(f"rename needs one new name for each old one, got {old} and {new}.")
        columns = self._tensor_columns
        tensors = columns.peek()
        only(tensors, old, "batch")
        names = [dict(zip(old, new, strict=True)).get(key, key) for key in tensors]
        if len(set(names)) < len(names):
            raise SchemaError(f"renaming {old} to {new} gives two columns one name; columns: {listing(tensors)}.")
        self.batch = TensorColumns(columns.batch_size, dict(zip(names, tensors.values(), strict=True)))
        return self

    def union(self: T, other: T) -> T:
        """Add the columns and the ``meta_info`` of ``other`` in place; returns this batch.

        The rows must match, and entries of both must have equal values; otherwise this batch is unchanged.
        """
        united = self | other
        self.batch, self.non_tensor_batch = united._tensor_columns, united.non_tensor_batch
        self.meta_info = united.meta_info
        return self

    def reorder(self: T, indices: RowIndex) -> None:
        """Permute the rows in place: row ``indices[i]`` becomes row ``i``; ``select_idxs`` can drop or repeat rows."""
        rows = row_indices(indices, len(self))
        if sorted(rows.tolist()) != list(range(len(self))):
            raise SchemaError(
                f"reorder needs each of the {len(self)} rows once, got {len(rows)} indices "
                f"({len(set(rows.tolist()))} different). To drop or repeat rows use select_idxs."
            )
        ordered = self.select_idxs(rows)
        self.batch, self.non_tensor_batch = ordered._tensor_columns, ordered.non_tensor_batch

    def padding(self: T, padding_size: int, padding_candidate: str = "") -> None:
        """Append ``padding_size`` copies of the ``"first"`` or ``"last"`` row in place; empty means the last."""
        if padding_size < 0 or padding_candidate not in ("", "first", "last"):
            raise SchemaError(
                f"padding takes a number of rows and 'first' or 'last', got {padding_size} and '{padding_candidate}'."
            )
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.select_idxs([*range(len(self)), *[row] * padding_size])
        self.batch, self.non_tensor_batch = padded._tensor_columns, padded.non_tensor_batch

    # ---- rows ---------------------------------------------------------------------------------

    def sample_level_repeat(self: T, repeat_times: Sequence[int] | np.ndarray | Tensor) -> T:
        """Repeat row ``i`` ``repeat_times[i]`` times, copies next to each other."""
        times = torch.as_tensor(repeat_times)
        if times.shape != (len(self),):
            raise SchemaError(f"repeat_times needs one count for each of {len(self)} rows, got {describe(times)}.")
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times.long().cpu()))

    def unfold_column_chunks(self: T, n_split: int, split_keys: Sequence[str] | None = None) -> T:
        """Split each row into n = ``n_split`` rows: columns (bsz, n·k, ...) become (bsz·n, k, ...).

        Columns not in ``split_keys`` are repeated instead.
        """
        columns = {**self._tensor_columns.peek(), **self.non_tensor_batch}
        split = only(columns, split_keys or [], "the batch")
        for key, column in split.items():
            if column.ndim < 2 or column.shape[1] % n_split:
                raise SchemaError(f"column '{key}' {tuple(column.shape)} does not split into {n_split} pieces a row.")
        rows = torch.arange(len(self)).repeat_interleave(n_split)

        def pieces(key: str, column: ColumnT) -> ColumnT:
            if key not in split:
                return take(column, rows)
            return column.reshape(len(rows), column.shape[1] // n_split, *column.shape[2:])

        return self._map(pieces, len(rows))

    def split(self: T, split_size: int) -> list[T]:
        """Split into contiguous parts of ``split_size`` rows, the last possibly shorter; they share memory."""
        if split_size < 1:
            raise SchemaError(f"split_size must be a positive number of rows, got {split_size}.")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def make_iterator(
        self: T,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[T]:
        """Iterate ``epochs`` times over mini-batches; ``mini_batch_size`` must divide the number of rows.

        ``dataloader_kwargs`` go to ``torch.utils.data.DataLoader``; ``seed`` has an effect only with ``shuffle=True``
        there.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise SchemaError(f"mini_batch_size={mini_batch_size} does not divide the batch of {len(self)} rows.")
        loader: object = DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            **(dataloader_kwargs or {}),
        )
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    # ---- looking at it ------------------------------------------------------------------------

    def get_data_info(self: BatchLike) -> str:
        """List the columns with dtypes and shapes, and the entries of ``meta_info``, one per line."""
        lines = [f"batch {key}: {describe(value)}" for key, value in self._tensor_columns.tensors().items()]
        lines += [f"non_tensor_batch {key}: {describe(value)}" for key, value in self.non_tensor_batch.items()]
        lines += [f"meta_info {key}: {describe(value)}" for key, value in self.meta_info.items()]
        return "\n".join([f"{len(self)} rows", *lines])

    def print_size(self: T, prefix: str = "") -> str:
        """Log the memory of the columns (objects count as references only) and return the line."""
        tensors = sum(value.nbytes for value in self._tensor_columns.tensors().values())
        objects = sum(column.nbytes for column in self.non_tensor_batch.values())
        line = f"{prefix}{' ' if prefix else ''}{len(self)} rows: tensors {tensors:,} bytes, others {objects:,} bytes"
        logger.info("%s", line)
        return line
