"""A value for someone in the same process, who may write to it.

Between processes a batch is copied, and writes stay where they are made. Within one process the same holds,
because the receiver gets a copy as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from verl.protocol.data_proto import DataProto
from verl.protocol.tensordicts import is_tensordict, make_tensordict


def private_copy(value: Any) -> Any:
    """The same value, such that writes of the receiver and of the giver do not reach each other.

    Tensors, arrays, a ``TensorDict``, and a ``DataProto`` with the tensors and arrays of its ``meta_info`` are
    copied; the objects in an array of objects stay the same objects. Tensors lose their gradient, as on
    every way to a worker. Anything else is returned as it is.
    """
    if isinstance(value, Tensor) or is_tensordict(value):
        # Not torch's copies on write: they end the process when two threads write to one of them.
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, DataProto):
        batch = value.batch
        if batch is not None:
            batch = make_tensordict({key: private_copy(column) for key, column in batch.items()}, batch.batch_size)
        others = {key: column.copy() for key, column in value.non_tensor_batch.items()}
        meta_info = {key: private_copy(entry) for key, entry in value.meta_info.items()}
        return DataProto(batch, others, meta_info, value.auto_padding)
    return value
