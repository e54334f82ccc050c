"""Tensors of an idle model in host memory.

megatron-core's weights and gradients are views of large buffers, which the optimizer and the buckets of the reduction
view too. So the memory below them is freed and filled again, and every view stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class OffloadedMemory:
    """Parts of an engine's memory that may lie in host memory."""

    def __init__(self) -> None:
        self._parts: dict[str, Callable[[], Iterable[Tensor]]] = {}
        self._left: dict[str, list[tuple[Tensor, Tensor | None]]] = {}

    def add(self, part: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Name a part; ``tensors`` returns views of its memory, where several may view the same."""
        self._parts[part] = tensors

    def leave(self, part: str, keep: bool = True) -> None:
        """Free the device memory of a part; without ``keep`` it is zero when it is back. Nothing if it left before."""
        if part in self._left or part not in self._parts:
            return
        tensors = [tensor.detach() for tensor in self._parts[part]() if tensor.untyped_storage().nbytes()]
        memories = {tensor.untyped_storage().data_ptr(): _memory_of(tensor) for tensor in tensors}
        self._left[part] = [(m, m.to("cpu", copy=True) if keep else None) for m in memories.values()]
        for memory in memories.values():
            memory.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def back(self, part: str) -> None:
        """Fill the device memory of a part again. Nothing if it did not leave."""
        for memory, saved in self._left.pop(part, []):
            memory.untyped_storage().resize_(memory.numel())
            if saved is None:
                memory.zero_()
            else:
                memory.copy_(saved)


def _memory_of(tensor: Tensor) -> Tensor:
    """All bytes of the memory that ``tensor`` views."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
