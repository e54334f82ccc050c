"""A batch for someone in the same process, who may write to it.

Between processes a batch is copied, and writes stay where they are made. Within one process the same holds
without a copy: both sides read one memory, and the first write of either moves the writer to a copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol.data_proto import DataProto
from verl.protocol.tensordicts import make_tensordict

# Tensors that copy on write are torch's, but not under a public name.
_lazy_clone = getattr(torch, "_lazy_clone", None)


def lend(value: Any) -> Any:
    """The same value, such that writes of the receiver and of the giver do not reach each other.

    Columns of a ``DataProto`` and bare tensors share memory until one side writes. Tensors whose memory
    did not come from torch (from numpy, or shared between processes) are copied, as are arrays; the
    objects in an array of objects stay the same objects. Tensors lose their gradient, as on every way
    to a worker. Anything else is returned as it is.
    """
    if isinstance(value, Tensor):
        return _lent_tensor(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, DataProto):
        batch = value.batch
        if batch is not None:
            batch = make_tensordict({key: _lent_tensor(column) for key, column in batch.items()}, batch.batch_size)
        others = {key: column.copy() for key, column in value.non_tensor_batch.items()}
        return DataProto(batch, others, dict(value.meta_info), value.auto_padding)
    return value


def _lent_tensor(tensor: Any) -> Tensor:
    plain = tensor.detach()
    memory = plain.untyped_storage()
    if _lazy_clone is None or type(plain) is not Tensor or not memory.resizable() or memory.is_shared():
        return plain.clone()
    return _lazy_clone(plain)
