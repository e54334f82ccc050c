"""Tensors of an idle model in host memory, which on a machine with GPUs is pinned and kept for the next time.

megatron-core's weights and gradients are views of large buffers, which the optimizer and the buckets of the reduction
view too. So the memory below them is freed and filled again, and every view stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from verl.utils.pinned_memory import PIECE_BYTES, HostPieces


class OffloadedMemory:
    """Parts of an engine's memory that may lie in host memory."""

    def __init__(self) -> None:
        self._parts: dict[str, Callable[[], Iterable[Tensor]]] = {}
        self._offloaded: dict[str, list[tuple[Tensor, list[Tensor]]]] = {}
        self._pieces = HostPieces(is_pinned=torch.cuda.is_initialized())
        self._host_buffers: dict[tuple[str, int, int], list[Tensor]] = {}
        """Host memory by part, place in it and number of bytes: pinned memory takes longer to get than to fill."""

    def add(self, part: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Name a part; ``tensors`` returns views of its memory, where several may view the same."""
        self._parts[part] = tensors

    def offload(self, part: str, keep: bool = True) -> None:
        """Move a part to host memory; without ``keep`` it is zero once restored. No-op if it is there already."""
        if part in self._offloaded or part not in self._parts:
            return
        storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in self._parts[part]()) if s.nbytes()}
        # All bytes of each storage once, however many of the tensors view it.
        memories = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages.values()]
        self._offloaded[part] = [
            (memory, self._on_host(part, index, memory) if keep else []) for index, memory in enumerate(memories)
        ]
        for memory in memories:
            memory.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _on_host(self, part: str, index: int, memory: Tensor) -> list[Tensor]:
        key, pieces = (part, index, memory.numel()), memory.split(PIECE_BYTES)
        if key not in self._host_buffers:
            self._host_buffers[key] = [self._pieces.take(len(piece)) for piece in pieces]
        for buffer, piece in zip(self._host_buffers[key], pieces, strict=True):
            buffer.copy_(piece)
        return self._host_buffers[key]

    def restore(self, part: str) -> None:
        """Move a part back to the device. No-op if it was not offloaded."""
        for memory, saved in self._offloaded.pop(part, []):
            memory.untyped_storage().resize_(memory.numel())
            if not saved:
                memory.zero_()
            for piece, buffer in zip(memory.split(PIECE_BYTES), saved, strict=False):
                piece.copy_(buffer)
