"""Columns as flat buffers, so that crossing a process costs no copy that can be avoided.

A tensor travels as its bytes in a one-dimensional uint8 array. From protocol 5 on, pickle hands
such arrays over *out of band*, without copying them; Ray writes them once into its object store.
The byte view makes this work for dtypes that numpy lacks (bfloat16, float8).

On arrival the array may lie in read-only memory that other processes map as well. Torch has no
read-only tensors, so a write into such a view would change the batch of every other reader. A
received column in read-only memory is therefore copied once, and is then the receiver's own; a
buffer that is already private (a plain pickle) is adopted as it is. The copy also lets go of the
object store, which could otherwise not free the batch while any part of it is in use.

What arrives lies on the CPU, contiguous and without gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from verl.protocol.tensordicts import make_tensordict

if TYPE_CHECKING:
    from tensordict import TensorDict

WireTensor = tuple[str, tuple[int, ...], np.ndarray]
"""dtype name, shape, bytes."""
WireTensorDict = tuple[tuple[int, ...], dict[str, WireTensor]]
"""batch size, columns."""


def serialize_single_tensor(obj: Tensor) -> WireTensor:
    """dtype name, shape and bytes of a tensor; shares memory with a contiguous one on the CPU."""
    dense = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return str(dense.dtype).removeprefix("torch."), tuple(dense.shape), _flat(dense).view(torch.uint8).numpy()


def deserialize_single_tensor(arr: WireTensor) -> Tensor:
    """The tensor of ``serialize_single_tensor``, in memory that is safe to write to."""
    dtype, shape, data = arr
    return _flat(torch.from_numpy(owned(data))).view(getattr(torch, dtype)).view(shape)


def _flat(dense: Tensor) -> Tensor:
    # With one element or none, a contiguous tensor may have any stride; a view as another dtype needs 1.
    return dense.as_strided((dense.numel(),), (1,))


def serialize_tensordict(batch: TensorDict) -> WireTensorDict:
    """Batch size, and each column as ``serialize_single_tensor`` gives it."""
    return tuple(batch.batch_size), {key: serialize_single_tensor(cast(Tensor, value)) for key, value in batch.items()}


def deserialize_tensordict(arr: WireTensorDict) -> TensorDict:
    """The TensorDict of ``serialize_tensordict``."""
    batch_size, columns = arr
    return make_tensordict({key: deserialize_single_tensor(value) for key, value in columns.items()}, batch_size)


def owned(array: np.ndarray) -> np.ndarray:
    """The array itself if it may be written to, else a copy."""
    return array if array.flags.writeable else array.copy()
