"""The backend of training engines on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from verl.backends.base import Backend
from verl.backends.cuda.layers import use_fused_layers


class CUDABackend(Backend):
    """Backend for GPUs: norms, gates and rotations by Liger's kernels, all else by PyTorch."""

    def _use_fast_layers(self, model: nn.Module, dtype: torch.dtype) -> Callable[[], None] | None:
        return use_fused_layers(model)
