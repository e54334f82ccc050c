"""Making TensorDicts and taking them apart.

The only module that loads ``tensordict``, and only when a batch has tensors: it pulls in torch's
compiler, which more than doubles the time of an import.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

from verl.errors import SchemaError
from verl.protocol.columns import Columns, describe, unite

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase


def is_tensordict(value: Any) -> TypeGuard[TensorDict]:
    """Whether ``value`` is a TensorDict."""
    # What is no TensorDict shows without loading the library.
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(value, tensordict.TensorDict)


def make_tensordict(tensors: Mapping[str, Any], batch_size: Sequence[int]) -> TensorDict:
    """A new TensorDict of these columns."""
    from tensordict import TensorDict

    return TensorDict(dict(tensors), batch_size=list(batch_size))


def tensordict_of(tensors: Mapping[str, Tensor], num_batch_dims: int) -> TensorDict:
    """The columns as a TensorDict whose batch size is their common ``num_batch_dims`` first dimensions.

    Raises:
        SchemaError: a value is no tensor, or the first dimensions differ.
    """
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise SchemaError(f"column '{key}' is a {type(value).__name__}, not a tensor; give it as a non-tensor.")
    sizes = {tuple(value.shape[:num_batch_dims]) for value in tensors.values()}
    if len(sizes) > 1 or len(next(iter(sizes))) < num_batch_dims:
        raise SchemaError(
            f"all columns need the same first {num_batch_dims} dimension(s), got "
            f"{', '.join(f'{key}: {describe(value)}' for key, value in sorted(tensors.items()))}."
        )
    return make_tensordict(tensors, sizes.pop())


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """The columns of both, in a new TensorDict.

    Raises:
        SchemaError: the numbers of rows differ, or both hold a column and its values differ.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise SchemaError(
            f"cannot unite tensors of batch size {tuple(tensor_dict1.batch_size)} with tensors of batch size "
            f"{tuple(tensor_dict2.batch_size)}: rows must correspond one to one."
        )
    united = unite(dict(tensor_dict1.items()), dict(tensor_dict2.items()), "column")
    return make_tensordict(united, tensor_dict1.batch_size)


def parts_of(tensor_dict: TensorDictBase | None) -> tuple[dict[str, Tensor], dict[str, list], dict[str, Any]]:
    """Tensors, non-tensors with a value per row, and non-tensors that belong to the whole."""
    from tensordict import NonTensorData, NonTensorStack

    tensors: dict[str, Tensor] = {}
    per_row: dict[str, list] = {}
    shared: dict[str, Any] = {}
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
    tensors: Mapping[str, Tensor], columns: Columns, shared: Mapping[str, Any], rows: int
) -> TensorDict:
    """What ``parts_of`` takes apart."""
    from tensordict import NonTensorData, NonTensorStack

    whole = make_tensordict(tensors, [rows])
    for key, column in columns.items():
        whole.set(key, NonTensorStack(*[NonTensorData(value) for value in column]))
    for key, value in shared.items():
        whole.set_non_tensor(key, value)
    return whole
