"""The arithmetic of columns: when two are equal, how they unite, which rows an index means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.protocol.received import ReceivedColumn

Columns = dict[str, np.ndarray]
RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | Tensor


# ---- making and describing ----------------------------------------------------------------------


def object_array(values: Iterable[Any]) -> np.ndarray:
    """(n,) array of dtype object with one value per row, also where the values are lists of equal length.

    ``np.array([[1, 2], [3, 4]], dtype=object)`` would have shape (2, 2): two columns instead of two lists.
    """
    rows = list(values)
    array = np.empty(len(rows), dtype=object)
    for i, value in enumerate(rows):
        array[i] = value
    return array


def as_column(key: str, values: Any) -> np.ndarray:
    """An array as it is, a list or tuple as an object array.

    Raises:
        SchemaError: something else.
    """
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, list | tuple):
        return object_array(values)
    raise SchemaError(
        f"column '{key}' is a {type(values).__name__}; columns are tensors, arrays, or lists with one value per row."
    )


def describe(value: Any) -> str:
    """A value in a few words, for messages: ``float32 (8, 16)`` for arrays, a short repr otherwise."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def listing(names: Iterable[Any]) -> str:
    """Names for a message, sorted; ``nothing`` if there are none."""
    return ", ".join(sorted(map(str, names))) or "nothing"


# ---- equality and union -------------------------------------------------------------------------


def same_value(a: Any, b: Any) -> bool:
    """Equality of anything that a column or ``meta_info`` may hold; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _same_tensor(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and _same_array(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    # Only a NaN differs from itself.
    return bool(a == b) or bool(a != a and b != b)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _same_array(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype == object or b.dtype == object:
        return all(same_value(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
    return bool(np.all((a == b) | ((a != a) & (b != b))))


def union_numpy_dict(tensor_dict1: Columns, tensor_dict2: Columns) -> Columns:
    """The columns of both, in a new dict.

    Raises:
        SchemaError: both hold a column and its values differ.
    """
    return unite(tensor_dict1, tensor_dict2, "column")


def unite(a: Mapping[str, Any], b: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The entries of both, in a new dict.

    Raises:
        SchemaError: both hold an entry and its values differ.
    """
    for key in a:
        if key in b and not same_value(a[key], b[key]):
            raise SchemaError(
                f"{what} '{key}' is in both batches with different values: {describe(a[key])} and {describe(b[key])}"
                f"{_first_difference(a[key], b[key])}. Drop it from one side (select or pop), or rename it."
            )
    return {**a, **b}


def _first_difference(a: Any, b: Any) -> str:
    if not isinstance(a, Tensor | np.ndarray) or a.ndim == 0 or (a.shape, a.dtype) != (b.shape, b.dtype):
        return ""
    row = next(row for row, (x, y) in enumerate(zip(a, b, strict=True)) if not same_value(x, y))
    return f", which differ from row {row} on"


# ---- choosing -----------------------------------------------------------------------------------


def only(entries: Mapping[str, Any], keys: Sequence[str] | None, where: str) -> dict[str, Any]:
    """The entries named, in their own order; all for None.

    Raises:
        SchemaError: a name is not there.
    """
    if keys is None:
        return dict(entries)
    missing = [key for key in keys if key not in entries]
    if missing:
        raise SchemaError(f"{where} has no '{missing[0]}'; it has: {listing(entries)}.")
    return {key: value for key, value in entries.items() if key in keys}


def row_indices(index: RowIndex, length: int) -> Tensor:
    """The row numbers that a list, an array or a mask selects, as (n,) int64 on the CPU.

    Raises:
        SchemaError: not one-dimensional, neither whole numbers nor booleans, a mask of another
            length than the batch, or a row that does not exist.
    """
    given: Any = index
    rows = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    if rows.ndim != 1 or (rows.dtype.kind not in "iub" and rows.size):
        raise SchemaError(
            f"rows are chosen by a one-dimensional list of whole numbers or booleans, got {describe(rows)}."
        )
    if rows.dtype == bool:
        if len(rows) != length:
            raise SchemaError(f"a mask of {len(rows)} values cannot choose from a batch of {length} rows.")
        return torch.from_numpy(rows.nonzero()[0])
    outside = (rows < -length) | (rows >= length)
    if outside.any():
        raise SchemaError(f"row {rows[outside][0]} does not exist: the batch has {length} rows.")
    return torch.from_numpy(np.where(rows < 0, rows + length, rows).astype(np.int64))


def take(column: Any, rows: Tensor) -> Any:
    """The rows of a tensor or an array, in new memory."""
    return column[rows.to(column.device)] if isinstance(column, Tensor) else column[rows.numpy()]


# ---- joining ------------------------------------------------------------------------------------


def concat_columns(parts: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Each column of all parts, one below the other.

    Raises:
        SchemaError: a part lacks a column, or has it with other dimensions or another dtype.
    """
    first = parts[0]
    for number, part in enumerate(parts):
        for key in first.keys() ^ part.keys():
            lacking = number if key in first else 0
            raise SchemaError(
                f"{kind} '{key}' is missing in batch {lacking} of {len(parts)} (it has: {listing(parts[lacking])}); "
                "batches to be joined need the same columns."
            )
        for key, value in part.items():
            # numpy may widen, as it must for texts of different lengths; torch would do so silently.
            same_dtype = value.dtype == first[key].dtype or isinstance(value, np.ndarray)
            if value.shape[1:] != first[key].shape[1:] or not same_dtype:
                raise SchemaError(
                    f"{kind} '{key}' is {describe(first[key])} in batch 0 and {describe(value)} in batch {number}; "
                    "only the number of rows may differ. Pad to one length, or convert to one dtype, first."
                )
    return {key: _concat([part[key] for part in parts]) for key in first}


def _concat(values: list[Any]) -> Any:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    if all(isinstance(value, ReceivedColumn) for value in values):
        return ReceivedColumn.concat(values)
    return torch.cat([value.tensor() if isinstance(value, ReceivedColumn) else value for value in values])


def list_of_dict_to_dict_of_list(list_of_dict: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows to columns: ``[{"a": 1}, {"a": 2}]`` becomes ``{"a": [1, 2]}``; no rows become no columns.

    Raises:
        SchemaError: a row has other keys than the first.
    """
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for number, row in enumerate(list_of_dict):
        if row.keys() != keys:
            raise SchemaError(f"row {number} has the keys {listing(row)}, row 0 has {listing(keys)}; they must agree.")
    return {key: [row[key] for row in list_of_dict] for key in keys}
