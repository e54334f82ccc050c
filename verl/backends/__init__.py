"""Device backends of training engines; :func:`backend_for` selects one."""

from __future__ import annotations

import torch

from verl.backends.base import Backend
from verl.backends.cuda.layers import fuses_layers


def backend_for(device: torch.device, use_liger: bool | None = False) -> Backend:
    """Return a new backend for one engine that computes on ``device``.

    Args:
        device: of the engine.
        use_liger: see ``model.use_liger``.

    Raises:
        ConfigError: ``use_liger`` is true, and the package is not installed on this machine with a GPU.
    """
    if device.type == "cpu":
        from verl.backends.cpu.backend import CPUBackend  # slow: it loads Transformers

        return CPUBackend(device)
    if device.type == "cuda" and fuses_layers(use_liger):
        from verl.backends.cuda.backend import CUDABackend

        return CUDABackend(device)
    return Backend(device)
