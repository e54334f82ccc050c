"""Operations on single columns: compare, unite, index and join them.

The only module that imports ``tensordict``, and only on first use of ``DataProto.batch``: tensordict loads torch's
compiler, which more than doubles the import time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.errors import MissingColumnError, NoSuchRowError, SchemaError

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

T = TypeVar("T")
ColumnT = TypeVar("ColumnT", Tensor, np.ndarray)

Columns = dict[str, np.ndarray]
RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | Tensor


# ---- making and describing ----------------------------------------------------------------------


def object_array(values: Iterable[object]) -> np.ndarray:
    """Build an (n,) object array with one value per row.

    ``np.array([[1, 2], [3, 4]], dtype=object)`` would have shape (2, 2) instead of holding two lists.
    """
    rows = list(values)
    array = np.empty(len(rows), dtype=object)
    for i, value in enumerate(rows):
        array[i] = value
    return array


def as_column(key: str, values: object) -> np.ndarray:
    """Return arrays unchanged, lists and tuples as an object array; refuse other types."""
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, list | tuple):
        return object_array(values)
    raise SchemaError(
        f"column '{key}' is a {type(values).__name__}; columns are tensors, arrays, or lists with one value per row."
    )


def describe(value: object) -> str:
    """Describe a value for error messages: ``float32 (8, 16)`` for tensors and arrays, else a short repr."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def listing(names: Iterable[object]) -> str:
    """Join names for a message, sorted; ``nothing`` if there are none."""
    return ", ".join(sorted(map(str, names))) or "nothing"


# ---- equality and union -------------------------------------------------------------------------


def same_value(a: object, b: object) -> bool:
    """Compare any values that a column or ``meta_info`` may hold; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _same_tensor(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and _same_array(a, b)
    if hasattr(a, "tolist") and hasattr(b, "tolist"):  # columns of a TensorDict that are no tensors compare by row
        return same_value(a.tolist(), b.tolist())  # type: ignore[attr-defined]
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
    """Unite two dicts of columns in a new dict; a column of both must have equal values."""
    return unite(tensor_dict1, tensor_dict2, "column")


def unite(a: Mapping[str, T], b: Mapping[str, T], what: str) -> dict[str, T]:
    """Unite two dicts in a new one; an entry of both must have equal values. ``what`` names entries in errors."""
    for key in a:
        if key in b and not same_value(a[key], b[key]):
            raise SchemaError(
                f"{what} '{key}' is in both batches with different values: {describe(a[key])} and {describe(b[key])}"
                f"{_first_difference(a[key], b[key])}. {_remedy(key, what)}"
            )
    return {**a, **b}


def _remedy(key: str, what: str) -> str:
    if "meta_info" in what:
        return (
            f"Remove it from one side (pop(meta_info_keys=['{key}'])); what differs between rows belongs into a column."
        )
    return "Drop it from one side (select or pop), or rename it."


def _first_difference(a: object, b: object) -> str:
    if not isinstance(a, Tensor | np.ndarray) or not isinstance(b, Tensor | np.ndarray):
        return ""
    if a.ndim == 0 or (a.shape, a.dtype) != (b.shape, b.dtype):
        return ""
    row = next(row for row, (x, y) in enumerate(zip(a, b, strict=True)) if not same_value(x, y))
    return f", which differ from row {row} on"


# ---- choosing -----------------------------------------------------------------------------------


def only(entries: Mapping[str, T], keys: Sequence[str] | None, where: str) -> dict[str, T]:
    """Select entries by name, in the order of ``entries``; None selects all, an unknown name is an error."""
    if keys is None:
        return dict(entries)
    missing = [key for key in keys if key not in entries]
    if missing:
        raise MissingColumnError(f"{where} has no '{missing[0]}'; it has: {listing(entries)}.")
    return {key: value for key, value in entries.items() if key in keys}


def row_indices(index: RowIndex, length: int) -> Tensor:
    """Convert a list, array or boolean mask to row numbers, (n,) int64 on the CPU.

    Negative numbers count from the end; a mask must be as long as the batch.
    """
    selection = index
    rows = np.asarray(selection.detach().cpu() if isinstance(selection, Tensor) else selection)
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
        raise NoSuchRowError(f"row {rows[outside][0]} does not exist: the batch has {length} rows.")
    return torch.from_numpy(np.where(rows < 0, rows + length, rows).astype(np.int64))


def take(column: ColumnT, rows: Tensor) -> ColumnT:
    """Select rows of a tensor or an array, in new memory."""
    return column[rows.to(column.device)] if isinstance(column, Tensor) else column[rows.numpy()]


# ---- joining ------------------------------------------------------------------------------------


def columns_to_join(parts: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[Any]]:
    """Collect each column's values over all parts; columns, dtypes and trailing dimensions must agree."""
    first = parts[0]
    for part_index, part in enumerate(parts):
        for key in first.keys() ^ part.keys():
            lacking = part_index if key in first else 0
            raise SchemaError(
                f"{kind} '{key}' is missing in batch {lacking} of {len(parts)} (it has: {listing(parts[lacking])}); "
                "batches to be joined need the same columns."
            )
        for key, value in part.items():
            # numpy may widen the dtype, as strings of different lengths require; torch would widen numbers silently.
            same_dtype = value.dtype == first[key].dtype or isinstance(value, np.ndarray)
            if value.shape[1:] != first[key].shape[1:] or not same_dtype:
                raise SchemaError(
                    f"{kind} '{key}' is {describe(first[key])} in batch 0 and {describe(value)} in batch {part_index}; "
                    "only the number of rows may differ. Pad to one length, or convert to one dtype, first."
                )
    return {key: [part[key] for part in parts] for key in first}


def gather_metrics(metrics: Iterable[Any]) -> dict[str, list[object]]:
    """Collect the values of each metric of several workers; each gives one dict, or a list of dicts.

    ``[{"loss": 1}, {"loss": [2, 3]}]`` becomes ``{"loss": [1, 2, 3]}``.
    """
    gathered: dict[str, list[object]] = {}
    for worker_metrics in metrics:
        for metrics_dict in [worker_metrics] if isinstance(worker_metrics, Mapping) else worker_metrics:
            for name, value in metrics_dict.items():
                gathered.setdefault(name, []).extend(value if isinstance(value, list | tuple) else [value])
    return gathered


def list_of_dict_to_dict_of_list(list_of_dict: list[dict[str, object]]) -> dict[str, list[object]]:
    """Turn rows with equal keys into columns: ``[{"a": 1}, {"a": 2}]`` becomes ``{"a": [1, 2]}``."""
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for row_index, row in enumerate(list_of_dict):
        if row.keys() != keys:
            raise SchemaError(
                f"row {row_index} has the keys {listing(row)}, row 0 has {listing(keys)}; they must agree."
            )
    return {key: [row[key] for row in list_of_dict] for key in keys}


# ---- TensorDicts --------------------------------------------------------------------------------


def is_tensordict(value: object) -> TypeGuard[TensorDict]:
    """Return whether ``value`` is a TensorDict."""
    # If the library is not loaded, no TensorDict can exist.
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(value, tensordict.TensorDict)


def make_tensordict(tensors: Mapping[str, object], batch_size: Sequence[int]) -> TensorDict:
    """Create a TensorDict; imports the library."""
    from tensordict import TensorDict

    return TensorDict(dict(tensors), batch_size=list(batch_size))


def common_batch_size(tensors: Mapping[str, Tensor], num_batch_dims: int) -> tuple[int, ...]:
    """Return the first ``num_batch_dims`` dimensions, which all columns must share."""
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise SchemaError(f"column '{key}' is a {type(value).__name__}, not a tensor; give it as a non-tensor.")
    sizes = {tuple(value.shape[:num_batch_dims]) for value in tensors.values()}
    if len(sizes) > 1 or len(next(iter(sizes))) < num_batch_dims:
        raise SchemaError(
            f"all columns need the same first {num_batch_dims} dimension(s), got "
            f"{', '.join(f'{key}: {describe(value)}' for key, value in sorted(tensors.items()))}."
        )
    return sizes.pop()


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Unite two TensorDicts in a new one; a column of both must have equal values."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise SchemaError(
            f"cannot unite tensors of batch size {tuple(tensor_dict1.batch_size)} with tensors of batch size "
            f"{tuple(tensor_dict2.batch_size)}: rows must correspond one to one."
        )
    united = unite(dict(tensor_dict1.items()), dict(tensor_dict2.items()), "column")
    return make_tensordict(united, tensor_dict1.batch_size)


def parts_of(tensor_dict: TensorDictBase | None) -> tuple[dict[str, Tensor], dict[str, list], dict[str, object]]:
    """Split a TensorDict into tensors, non-tensor values per row, and non-tensor values shared by all rows."""
    from tensordict import NonTensorData, NonTensorStack

    tensors: dict[str, Tensor] = {}
    per_row: dict[str, list] = {}
    shared: dict[str, object] = {}
    for key in tensor_dict.keys() if tensor_dict is not None else ():
        value = tensor_dict.get(key)  # type: ignore[union-attr]
        if isinstance(value, NonTensorStack):
            per_row[key] = value.tolist()
        elif isinstance(value, NonTensorData):
            shared[key] = value.data
        else:
            tensors[key] = value
    return tensors, per_row, shared


def whole_tensordict(
    tensors: Mapping[str, Tensor], columns: Columns, shared: Mapping[str, object], rows: int
) -> TensorDict:
    """Invert ``parts_of``."""
    from tensordict import NonTensorData, NonTensorStack

    tensordict = make_tensordict(tensors, [rows])
    for key, column in columns.items():
        tensordict.set(key, NonTensorStack(*[NonTensorData(value) for value in column]))
    for key, value in shared.items():
        tensordict.set_non_tensor(key, value)
    return tensordict
