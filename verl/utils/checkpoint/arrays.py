"""Training states as arrays, which Ray moves through shared memory without a copy in between.

Ray pickles a torch tensor as bytes inside of the message; the buffer of a NumPy array it hands over as it is.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorArray:
    """The bits of a tensor on the CPU; NumPy does not know each of its number formats."""

    dtype: str
    """Of the tensor, e.g. ``"bfloat16"``."""
    bits: np.ndarray
    """Integers of the same size, in the same shape."""


def to_arrays(state: Any) -> Any:
    """``state`` with a :class:`TensorArray` over the same memory for each tensor in its dicts, lists and tuples."""
    if isinstance(state, Tensor):
        tensor = state.detach().contiguous()
        return TensorArray(str(tensor.dtype).removeprefix("torch."), tensor.view(_BITS[tensor.element_size()]).numpy())
    return _mapped(state, to_arrays)


def from_arrays(state: Any) -> Any:
    """The inverse of :func:`to_arrays`; the tensors are over memory that may be read only: copy before writing."""
    if isinstance(state, TensorArray):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(state.bits).view(getattr(torch, state.dtype))
    return _mapped(state, from_arrays)


def _mapped(state: Any, function: Any) -> Any:
    if isinstance(state, dict):
        return {key: function(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(function(value) for value in state)
    return state
