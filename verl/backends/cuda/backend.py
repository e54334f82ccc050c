"""The backend of training engines on NVIDIA GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from verl.backends.base import Backend
from verl.backends.cuda.layers import use_fused_layers

logger = logging.getLogger(__name__)


class CUDABackend(Backend):
    """Backend for GPUs: norms, gates and rotations by Liger's kernels, all else by PyTorch."""

    def install(
        self,
        model: nn.Module,
        units: Sequence[FSDPModule],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        name: str,
        difference: Callable[[], float | None],
    ) -> None:
        """See :meth:`Backend.install`."""
        super().install(model, units, group, dtype, name, difference)
        undo = use_fused_layers(model)
        if (gap := difference()) is not None:
            undo()
            logger.warning(
                "%s uses the layers of Transformers, which are slower: with Liger's kernels its log-probs differ by "
                "%.2g from its own.",
                name,
                gap,
            )
