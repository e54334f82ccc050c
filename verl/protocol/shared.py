"""Tensors of one sample that many rows of batches share, such as the pixels of a prompt's images.

Rows refer to one object: the n responses of a prompt, and all batches of a step, hold its bytes once. On Ray the driver
puts the bytes into the object store once, calls carry a reference, and a process that reads it maps the store's memory:

    data set ─► driver ─► object store ◄── rank 0, rank 1: read where they lie, joined per pass
                  └─ rows: references ──►
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.protocol.stored import MIN_BYTES, travels_by_reference

Arrays = dict[str, np.ndarray]


class SharedTensors(Mapping[str, Tensor]):
    """Named tensors of one sample on the CPU, to be read only.

    Reading one gives a copy; :func:`joined` reads many without one copy more.

    Args:
        tensors: by name; their memory is shared, not copied, if they are contiguous and on the CPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._arrays: Arrays | None = {name: t.detach().cpu().contiguous().numpy() for name, t in tensors.items()}
        self._reference: object = None
        self.nbytes = sum(array.nbytes for array in self._arrays.values())
        """Bytes of all tensors."""

    def arrays(self) -> Arrays:
        """Return the values as arrays, which may lie in read-only memory that other processes map."""
        if self._arrays is None:
            self._arrays = sys.modules["ray"].get(self._reference)  # where there are references, Ray is loaded
        assert self._arrays is not None
        return self._arrays

    def store(self, put: Callable[[Arrays], object]) -> None:
        """Move the bytes to Ray's object store by ``put``, once; small ones stay, as those of small columns do."""
        if self._reference is None and self.nbytes >= MIN_BYTES:
            self._reference = put(self.arrays())
            self._arrays = None
            _received[self._reference] = self

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays()[name].copy())

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays())

    def __len__(self) -> int:
        return len(self.arrays())

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"SharedTensors({self.nbytes} bytes)"

    def __reduce__(self) -> tuple[object, ...]:
        if self._reference is not None and travels_by_reference():
            return _referred, (self._reference, self.nbytes)
        return _given, (self.arrays(),)


_received: WeakValueDictionary[object, SharedTensors] = WeakValueDictionary()
"""Tensors that this process received by reference; rows of several calls share them."""


def _given(arrays: Arrays) -> SharedTensors:
    tensors = SharedTensors({})
    tensors._arrays, tensors.nbytes = arrays, sum(array.nbytes for array in arrays.values())
    return tensors


def _referred(reference: object, nbytes: int) -> SharedTensors:
    tensors = _received.get(reference)
    if tensors is None:
        tensors = _received[reference] = SharedTensors({})
        tensors._arrays, tensors._reference, tensors.nbytes = None, reference, nbytes
    return tensors


def store_all(columns: Iterable[np.ndarray], put: Callable[[Arrays], object]) -> None:
    """Store the shared tensors in columns of objects; see :meth:`SharedTensors.store`."""
    for column in columns:
        if column.dtype == object:
            for value in {id(value): value for value in column.ravel() if isinstance(value, SharedTensors)}.values():
                value.store(put)


def joined(rows: Sequence[Mapping[str, object]], name: str) -> Tensor | None:
    """Concatenate a tensor of all rows along its first dimension, in new memory; None if no row has it.

    Raises:
        SchemaError: a row of a column holds no mapping.
    """
    parts = []
    for row_index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise SchemaError(f"row {row_index} has {type(row).__name__} where the inputs of its images are expected.")
        if name in row:
            parts.append(row.arrays()[name] if isinstance(row, SharedTensors) else np.asarray(row[name]))
    return torch.from_numpy(np.concatenate(parts)) if parts else None


def bytes_held(column: np.ndarray) -> tuple[int, int]:
    """Return the bytes of the distinct objects of a column, and what they would be if each row had its own."""
    values = [value for value in column if isinstance(value, SharedTensors)]
    bytes_by_id = {id(value): value.nbytes for value in values}
    return sum(bytes_by_id.values()), sum(value.nbytes for value in values)
