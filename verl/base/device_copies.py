"""Copies of tensors to a device, for which this process does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str | int) -> Tensor:
    """Return ``tensor`` on ``device``; a copy to a GPU is queued there, and this process does not wait for it.

    The copy goes through pinned memory, which PyTorch keeps for later copies and reuses when the copy is done. From
    other memory a copy begins when all that was queued before it has ended, and the GPU then idles until the next
    kernels are queued.
    """
    target = torch.device(device)
    if tensor.device.type != "cpu" or target.type == "cpu":
        return tensor.to(target)
    is_pinned = target.type == "cuda" and not tensor.is_nested
    return (tensor.pin_memory() if is_pinned else tensor).to(target, non_blocking=True)
