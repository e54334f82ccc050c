"""Pinned host memory without the rounding of PyTorch, which gives each allocation the next power of two of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE_BYTES = 2**30
"""Largest allocation that is made ahead of need."""
_ALIGNMENT = 64


@dataclass
class HostPieces:
    """Host memory that is taken piece by piece and never given back, cut from allocations of a power of two.

    With an allocation for each tensor, weights and moments took 1.8 to 1.9 times their bytes.
    """

    is_pinned: bool
    """Let a GPU copy directly; it needs one."""
    allocated_bytes: int = 0
    _rests: list[NDArray[np.uint8]] = field(default_factory=list)

    def take(self, nbytes: int) -> Tensor:
        """Return memory of ``nbytes`` bytes that nobody else has."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        index = next((index for index, rest in enumerate(self._rests) if len(rest) >= size), None)
        if index is None:
            index = len(self._rests)
            # The more there is, the more is allocated ahead: few allocations, of which little is unused.
            ahead = max(size, min(self.allocated_bytes, PIECE_BYTES), 1)
            allocated = torch.empty(1 << (ahead - 1).bit_length(), dtype=torch.uint8, pin_memory=self.is_pinned)
            self.allocated_bytes += len(allocated)
            self._rests.append(allocated.numpy())
        rest = self._rests[index]
        self._rests[index] = rest[size:]
        if not len(self._rests[index]):
            del self._rests[index]
        # By NumPy each piece is a storage of its own; of a slice, torch.save would write the whole allocation.
        return torch.from_numpy(rest[:nbytes])

    def take_like(self, tensor: Tensor) -> Tensor:
        """Return memory for the elements of a tensor, in its format and shape, contiguous."""
        return self.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
