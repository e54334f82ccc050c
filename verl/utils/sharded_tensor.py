"""Gather tensors that FSDP2 shards by rows over the ranks, or access the local rows."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def full_tensor(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole tensor on every rank, on ``device`` if it is a DTensor. Collective if it is sharded.

    Then it is converted to ``dtype`` first, if that is given: ranks exchange half as much of bf16 as of fp32.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    if all(size == 1 or not placement.is_shard() for size, placement in mesh):  # this rank has all rows
        return cast(DTensor, tensor.detach()).to_local().to(device)
    return cast(DTensor, tensor.detach().to(device, dtype or tensor.dtype)).full_tensor()


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor and the index of the first one.

    FSDP2 gives each rank ceil(rows / ranks) rows of the first dimension; the last ranks may have fewer or none.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    local = cast(DTensor, tensor.detach()).to_local()
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0
            ranks = tensor.device_mesh.size(dim)
            rank = tensor.device_mesh.get_local_rank(dim)
            start = min(rank * -(-tensor.shape[0] // ranks), tensor.shape[0])
            return local, start
    return local, 0
