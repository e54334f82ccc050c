"""State besides the model (driver, random generators), and states as NumPy arrays for transfer through Ray."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from verl.utils.deferred import Deferred

STATE, DATA, RNG = "trainer_state.json", "data.pt", "driver_rng.pt"
"""Files of the driver in the folder of a step."""
PENDING = "pending"
"""Folder in it: one safetensors file for each batch that was sampled and not trained on yet."""

State = dict[str, Any]
"""Content of a ``.pt`` file, or of a snapshot of one rank: tensors, numbers, strings, and lists and dicts of them.

The values are ``Any`` because each kind of file has its own entries; what reads a file checks them."""


class BatchForFile(Protocol):
    """A batch: :class:`verl.protocol.DataProto`, which this room does not know."""

    def save_to_disk(self, filepath: Path) -> None:
        """Write the batch to a file."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The driver's state between two steps, as plain numbers, strings and tensors that share no memory with the run."""

    global_step: int
    """Number of finished steps."""
    dataloader: dict[str, object] | None
    """Position of the training data loader, with the state of its sampler and data set if they have one.

    None: only the number of steps is known."""
    controllers: dict[str, State | None]
    """Values that change from step to step besides the weights (KL and entropy coefficients, epochs), by name."""
    rng: dict[str, object] | None
    """Random generators of the driver process, if they were saved."""
    pending: Deferred[Mapping[str, BatchForFile | Path]] = field(default_factory=lambda: Deferred.from_value({}))
    """Batches that were sampled and not trained on yet, by name; of a checkpoint that was read, their files."""


# ---- random generators ---------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python's ``random``, as user code may draw from any of them."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    random.seed(seed)


def rng_state() -> dict[str, object]:
    """Return the state of every random generator of this process, as tensors and plain numbers."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, object] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: State) -> None:
    """Restore the state from :func:`rng_state`."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# ---- states as arrays ----------------------------------------------------------------------------
# Ray copies a torch tensor into the pickled message, but passes the buffer of a NumPy array without copying.

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element: integers of that size


@dataclass(frozen=True)
class TensorArray:
    """The bits of a CPU tensor as integers, since NumPy lacks some of torch's dtypes."""

    dtype: str
    """Format of the tensor's elements, e.g. ``"bfloat16"``."""
    bits: np.ndarray
    """Integers of the same size and shape."""


def to_arrays(state: object) -> Any:
    """Replace each tensor in nested dicts, lists and tuples by a :class:`TensorArray` over the same memory."""
    if isinstance(state, Tensor):
        tensor = state.detach().contiguous()
        return TensorArray(str(tensor.dtype).removeprefix("torch."), tensor.view(_BITS[tensor.element_size()]).numpy())
    return _mapped(state, to_arrays)


def from_arrays(state: object) -> Any:
    """Invert :func:`to_arrays`; the tensors' memory may be read-only, so copy before writing."""
    if isinstance(state, TensorArray):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(state.bits).view(getattr(torch, state.dtype))
    return _mapped(state, from_arrays)


def _mapped(state: object, function: Callable[[object], object]) -> object:
    if isinstance(state, dict):
        return {key: function(value) for key, value in state.items()}
    if type(state) is list:
        return [function(value) for value in state]
    if type(state) is tuple:
        return tuple(function(value) for value in state)
    return state
