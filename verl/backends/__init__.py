"""Device backends of training engines; :func:`backend_for` selects one."""

from __future__ import annotations

import torch

from verl.backends.base import Backend


def backend_for(device: torch.device) -> Backend:
    """Return a new backend for one engine that computes on ``device``."""
    if device.type == "cpu":
        from verl.backends.cpu.backend import CPUBackend  # slow: it loads Transformers

        return CPUBackend(device)
    return Backend(device)
