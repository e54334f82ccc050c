"""TensorDicts that carry non-tensor values beside tensors: one value per row (a stack), or one for all rows.

The batches of verl itself are ``DataProto``; ``DataProto.to_tensordict`` and ``from_tensordict`` convert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor
from torch.utils.data import DataLoader

from verl.errors import SchemaError
from verl.protocol.columns import describe, listing, row_indices, same_value

TensorDictT = TypeVar("TensorDictT", bound=TensorDictBase)

# ---- making ---------------------------------------------------------------------------------------


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, object] | None = None) -> TensorDict:
    """Create a TensorDict of tensors (dense or jagged), lists with one value per row, and values for all rows.

    >>> get_tensordict({"ids": torch.zeros(2, 3), "uid": ["a", "b"]}, {"temperature": 0.7}).batch_size
    torch.Size([2])

    Raises:
        SchemaError: the columns differ in their number of rows.
    """
    sizes = {key: len(value) for key, value in tensor_dict.items() if not isinstance(value, NonTensorData)}
    if len(set(sizes.values())) > 1:
        raise SchemaError(f"all columns need the same number of rows, got {sizes}.")
    tensordict = TensorDict({}, batch_size=[next(iter(sizes.values()))] if sizes else [])
    for key, value in tensor_dict.items():
        if isinstance(value, Tensor):
            tensordict.set(key, value)
        else:
            assign_non_tensor(tensordict, **{key: value})
    for key, value in (non_tensor_dict or {}).items():
        assign_non_tensor_data(tensordict, key, value)
    return tensordict


def list_of_dict_to_tensordict(list_of_dicts: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Create a TensorDict of rows with equal keys: tensors are stacked (jagged if their shapes differ), others kept."""
    columns: dict[str, object] = {}
    for key in list_of_dicts[0] if list_of_dicts else ():
        values = [row[key] for row in list_of_dicts]
        if not all(isinstance(value, Tensor) for value in values):
            columns[key] = values
        elif len({value.shape for value in values}) == 1:
            columns[key] = torch.stack(values)
        else:
            columns[key] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return get_tensordict(columns)


def assign_non_tensor(tensor_dict: TensorDictT, **kwargs: object) -> TensorDictT:
    """Set non-tensor values in place and return it: a list with one value per row, anything else for all rows."""
    for key, value in kwargs.items():
        if isinstance(value, list | NonTensorStack) and tensor_dict.batch_size:
            assign_non_tensor_stack(tensor_dict, key, value)
        else:
            assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def assign_non_tensor_data(tensor_dict: TensorDictBase, key: str, val: object) -> None:
    """Set one value for all rows, in place."""
    tensor_dict.set_non_tensor(key, unwrap_non_tensor_data(val))


def assign_non_tensor_stack(tensor_dict: TensorDictBase, key: str, val: Sequence[object]) -> None:
    """Set one value per row, in place."""
    values = unwrap_non_tensor_data(val)
    if len(values) != tensor_dict.batch_size[0]:
        raise SchemaError(f"'{key}' has {len(values)} values for {tensor_dict.batch_size[0]} rows.")
    tensor_dict.set(key, NonTensorStack(*[NonTensorData(value) for value in values]))


# ---- reading --------------------------------------------------------------------------------------


def unwrap_non_tensor_data(data: object) -> Any:
    """Return the value of a ``NonTensorData``, the list of a ``NonTensorStack``, and anything else unchanged."""
    if isinstance(data, NonTensorStack):
        return data.tolist()
    return data.data if isinstance(data, NonTensorData) else data


def get(tensordict: TensorDictBase, key: str, default: object = None) -> object:
    """Return a column as a tensor, a list with one value per row, or the value of all rows."""
    return unwrap_non_tensor_data(tensordict.get(key)) if key in tensordict.keys() else default


def get_non_tensor_data(data: TensorDictBase, key: str, default: object) -> object:
    """Return a non-tensor value, or ``default`` if there is none."""
    return get(data, key, default)


def get_keys(tensordict: TensorDictBase, keys: Iterable[str]) -> TensorDict:
    """Return the named columns as a new TensorDict.

    Raises:
        KeyError: one is missing.
    """
    return _selected(tensordict, keys, tensordict.get)


def pop(tensordict: TensorDictBase, key: str, default: object = None) -> object:
    """Remove a column in place and return it as :func:`get` does."""
    return unwrap_non_tensor_data(tensordict.pop(key)) if key in tensordict.keys() else default


def pop_keys(tensordict: TensorDictBase, keys: Iterable[str]) -> TensorDict:
    """Remove the named columns in place and return them as a new TensorDict.

    Raises:
        KeyError: one is missing.
    """
    return _selected(tensordict, keys, tensordict.pop)


def _selected(tensordict: TensorDictBase, keys: Iterable[str], take: Any) -> TensorDict:
    names = list(keys)
    if missing := [key for key in names if key not in tensordict.keys()]:
        raise KeyError(f"there is no column '{missing[0]}'; there are {listing(tensordict.keys())}.")
    selection = TensorDict({}, batch_size=tensordict.batch_size)
    for key in names:
        selection.set(key, take(key))
    return selection


def assert_tensordict_eq(tensordict1: TensorDictBase, tensordict2: TensorDictBase) -> None:
    """Raise ``AssertionError`` unless both have the same columns with equal values."""
    names = [set(td.keys()) for td in (tensordict1, tensordict2)]
    assert names[0] == names[1], f"only in one of them: {listing(names[0] ^ names[1])}"
    for key in names[0]:
        first, second = (_comparable(get(td, key)) for td in (tensordict1, tensordict2))
        assert same_value(first, second), f"'{key}' differs: {describe(first)} and {describe(second)}"


def _comparable(value: object) -> object:
    return list(value.unbind()) if isinstance(value, Tensor) and value.is_nested else value


# ---- rows -----------------------------------------------------------------------------------------


def index_select_tensor_dict(batch: TensorDictBase, indices: Any) -> TensorDict:
    """Return the rows ``indices`` (a list, an array, a tensor or a mask); values for all rows stay."""
    rows = row_indices(indices, batch.batch_size[0])
    selection = TensorDict({}, batch_size=[len(rows)])
    for key in batch.keys():
        value = batch.get(key)
        if isinstance(value, Tensor) and value.is_nested:
            parts = value.unbind()
            selected = [parts[row] for row in rows.tolist()]
            selection.set(key, nested_tensor_from_tensor_list(selected, _ragged_dimension(value)))
        elif isinstance(value, Tensor):
            selection.set(key, value[rows.to(value.device)])
        elif isinstance(value, NonTensorStack):
            values = value.tolist()
            assign_non_tensor_stack(selection, key, [values[row] for row in rows.tolist()])
        else:
            assign_non_tensor_data(selection, key, value)
    return selection


def chunk_tensordict(td: TensorDictBase, chunks: int) -> list[TensorDict]:
    """Split into ``chunks`` parts of equal size.

    Raises:
        SchemaError: the rows do not divide.
    """
    rows = len(td)
    if chunks < 1 or rows % chunks:
        raise SchemaError(f"{rows} rows do not split into {chunks} equal parts; pad them first (pad_to_divisor).")
    size = rows // chunks
    return [index_select_tensor_dict(td, range(start, start + size)) for start in range(0, rows, size)]


def concat_tensordict(data: Sequence[TensorDictBase]) -> TensorDict:
    """Join the rows of TensorDicts with the same columns; values for all rows must be equal."""
    joined = TensorDict({}, batch_size=[sum(len(part) for part in data)])
    for key in data[0].keys():
        parts = [part.get(key) for part in data]
        if isinstance(parts[0], Tensor):
            joined.set(key, concat_nested_tensors(parts) if parts[0].is_nested else torch.cat(parts))
        elif isinstance(parts[0], NonTensorStack):
            assign_non_tensor_stack(joined, key, [value for part in parts for value in part.tolist()])
        else:
            values = [unwrap_non_tensor_data(part) for part in parts]
            if not all(same_value(values[0], value) for value in values):
                raise SchemaError(f"'{key}' holds for all rows and differs: {', '.join(map(describe, values))}.")
            assign_non_tensor_data(joined, key, values[0])
    return joined


def concat_nested_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Join the rows of jagged tensors."""
    rows = [row for tensor in tensors for row in tensor.unbind()]
    return nested_tensor_from_tensor_list(rows, _ragged_dimension(tensors[0]))


def nested_tensor_from_tensor_list(tensor_list: Sequence[Tensor], ragged_idx: int | None = None) -> Tensor:
    """Create a jagged tensor of rows whose lengths differ in a dimension, the last unless given; 0 counts rows."""
    ragged = tensor_list[0].dim() if ragged_idx is None else ragged_idx
    lengths = torch.tensor([0, *(row.shape[ragged - 1] for row in tensor_list)], device=tensor_list[0].device)
    values = torch.cat(list(tensor_list), dim=ragged - 1)
    return torch.nested.nested_tensor_from_jagged(values, lengths.cumsum(0), jagged_dim=ragged)


def _ragged_dimension(nested: Tensor) -> int:
    # PyTorch would guess it from the rows, and guess wrong where all of them have one length.
    return next(dimension for dimension, size in enumerate(nested.shape) if not isinstance(size, int))


def make_iterator(
    tensordict: TensorDictBase,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, object] | None = None,
) -> Iterator[TensorDict]:
    """Yield mini-batches of equal size, ``epochs`` times over all rows; shuffled by ``seed`` if it is given.

    ``dataloader_kwargs`` go to PyTorch's ``DataLoader``.

    Raises:
        SchemaError: ``mini_batch_size`` does not divide the rows.
    """
    rows = len(tensordict)
    if rows % mini_batch_size:
        raise SchemaError(f"{rows} rows do not split into mini-batches of {mini_batch_size}.")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    settings = {"shuffle": seed is not None, **(dataloader_kwargs or {})}
    loader = DataLoader(range(rows), mini_batch_size, collate_fn=list, generator=generator, **settings)  # pyright: ignore
    for _ in range(epochs):
        for indices in loader:
            yield index_select_tensor_dict(tensordict, indices)


def pad_to_divisor(data: TensorDictBase, size_divisor: int) -> tuple[TensorDict, int]:
    """Repeat the first rows until ``size_divisor`` divides their number; return the result and how many were added."""
    rows = len(data)
    added = -rows % size_divisor
    return index_select_tensor_dict(data, [row % rows for row in range(rows + added)]), added


def unpad(data: TensorDictBase, pad_size: int) -> TensorDict:
    """Remove the last ``pad_size`` rows."""
    return index_select_tensor_dict(data, range(len(data) - pad_size))


def contiguous(data: TensorDictBase) -> TensorDictBase:
    """Return the same columns with dense tensors in contiguous memory."""
    return data.apply(lambda value: value if value.is_nested else value.contiguous())  # type: ignore[return-value]
