"""The CPU backend of training engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl.backends.base import Backend
from verl.backends.cpu.allocator import KEEP_BYTES, keep_freed_memory
from verl.backends.cpu.collectives import FrozenWeights, use_shared_memory
from verl.backends.cpu.kernels import cpu_kernels
from verl.backends.cpu.layers import use_fast_layers
from verl.backends.cpu.whole_weights import WholeWeights


class CPUBackend(Backend):
    """Backend for CPUs: keeps freed memory, runs layers on compiled kernels, lets local ranks share memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._frozen: FrozenWeights | None = None
        keep_freed_memory()

    def install(self, model: nn.Module, units: Sequence[FSDPModule], group: dist.ProcessGroup) -> None:
        """See :meth:`Backend.install`."""
        super().install(model, units, group)
        if dist.get_world_size(group) > 1:
            nbytes = sum(weight.numel() * weight.dtype.itemsize for weight in model.parameters())
            self._frozen = use_shared_memory(units, group, keeps_copy=nbytes <= KEEP_BYTES)
        self._weights = WholeWeights(model, None if self._frozen is None else group)

    def use_fast_layers(self, dtype: torch.dtype) -> Callable[[], None] | None:
        """See :meth:`Backend.use_fast_layers`."""
        if dtype is not torch.float32 or cpu_kernels() is None:
            return None  # in other formats Transformers' own layers are as fast
        return use_fast_layers(self._model, for_training=True)

    def frozen_weights(self) -> AbstractContextManager[None]:
        """See :meth:`Backend.frozen_weights`."""
        return nullcontext() if self._frozen is None else self._frozen()

    def whole_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`Backend.whole_weights`; the format stays, as ranks of one machine exchange nothing."""
        return iter(self._weights)
