"""The backend of training engines on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from verl.backends.base import Backend
from verl.backends.cuda.layers import use_fused_layers


class CUDABackend(Backend):
    """Backend for GPUs: norms, gates and rotations by Liger's kernels, all else by PyTorch."""

    def use_fast_layers(self, dtype: torch.dtype) -> Callable[[], None] | None:
        """See :meth:`Backend.use_fast_layers`."""
        return use_fused_layers(self._model)
