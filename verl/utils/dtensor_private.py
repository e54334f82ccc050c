"""Sharded tensors of any rank in one process, by names of PyTorch that are private to it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def mesh_of_rank(ranks: int, rank: int) -> DeviceMesh:
    """Return the mesh that ``rank`` of ``ranks`` has under FSDP2, without a process group to compute with."""
    mesh = DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("fsdp",), _init_backend=False, _rank=rank)
    mesh._dim_group_names = [GroupName("0")]  # the name of the group of all ranks, which the reading processes have
    return mesh


def sharded_by_rows(local: Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    """Return the tensor of ``shape`` whose rows on this rank of ``mesh`` are ``local``."""
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
