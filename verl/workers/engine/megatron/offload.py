"""Tensors of an idle model in host memory.

megatron-core's weights and gradients are views of large buffers, which the optimizer and the buckets of the reduction
view too. So the memory below them is freed and filled again, and every view stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """The contents of some device tensors while they are offloaded.

    Args:
        tensors: views of any memory; what several of them view is moved once.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._whole = [_memory_of(tensor) for tensor in found.values() if tensor.untyped_storage().nbytes()]
        self._saved: list[Tensor | None] | None = None

    def leave(self, keep: bool = True) -> None:
        """Free the device memory; without ``keep`` the contents are zero when they are back. Again: no change."""
        if self._saved is not None:
            return
        self._saved = [memory.to("cpu", copy=True) if keep else None for memory in self._whole]
        for memory in self._whole:
            memory.untyped_storage().resize_(0)

    def back(self) -> None:
        """Fill the device memory again; without :meth:`leave` before it nothing changes."""
        if self._saved is None:
            return
        for memory, saved in zip(self._whole, self._saved, strict=True):
            memory.untyped_storage().resize_(memory.numel())
            if saved is None:
                memory.zero_()
            else:
                memory.copy_(saved)
        self._saved = None


def _memory_of(tensor: Tensor) -> Tensor:
    """All bytes of the memory that ``tensor`` views."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
