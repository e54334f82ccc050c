"""Activations outside the memory of the device, until the backward pass needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def activations_on_cpu() -> Iterator[None]:
    """Copy what the backward pass of operations inside the context needs to CPU memory, and back when it is used.

    Weights stay where they are. Copies are not overlapped with computation.
    """

    def to_cpu(tensor: Tensor) -> tuple[torch.device, Tensor]:
        # A linear layer saves a transposed view of its weight, whose base is the parameter.
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        return tensor.device, tensor if is_weight else tensor.to("cpu")

    def to_device(saved: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = saved
        return tensor.to(device)

    with torch.autograd.graph.saved_tensors_hooks(to_cpu, to_device):
        yield
