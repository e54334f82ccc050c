"""Gather tensors that FSDP2 and tensor parallelism divide over the ranks, or access the part of this rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard


@dataclass(frozen=True)
class DividedTensor:
    """A tensor of which some ranks, such as those of a machine, have all elements together, each a box of them."""

    shape: Size
    """Shape of the whole tensor."""
    box: Tensor
    """The elements that this rank gives; none if another one gives the same."""
    start: tuple[int, ...]
    """Index of the first of them in each dimension."""

    @property
    def dtype(self) -> torch.dtype:
        """Number format."""
        return self.box.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize


def full_tensor(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole tensor on every rank, on ``device`` if it is a DTensor. Collective if it is sharded.

    Then it is converted to ``dtype`` first, if that is given: ranks exchange half as much of bf16 as of fp32.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    if all(size == 1 or divided_dim(placement) is None for size, placement in mesh):  # this rank has all of it
        return cast(DTensor, tensor.detach()).to_local().to(device)
    part = tensor.detach().to(device, dtype or tensor.dtype)
    assert isinstance(part, DTensor)
    gathered, division = part.to_local(), parts_of_ranks(tensor)
    if len(division) == 1:
        return part.full_tensor()
    # FSDP's rows first, then the parts of tensor-parallel ranks: both are contiguous.
    for mesh_dim, dim, sizes in division:
        along = part.device_mesh[part.device_mesh.mesh_dim_names[mesh_dim]]  # type: ignore[index]
        stride = torch.empty(sizes, device="meta").stride()
        gathered = DTensor.from_local(gathered, along, [Shard(dim)], run_check=False, shape=sizes, stride=stride)
        gathered = gathered.full_tensor()
    return gathered


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and the index of its first element in each dimension.

    Of n ranks each has ceil(size / n) of a dimension that is divided; the last ranks may have less or nothing. FSDP2
    divides the first dimension of what tensor parallelism leaves to a rank.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    local = cast(DTensor, tensor.detach()).to_local()
    first = [0] * tensor.dim()
    for mesh_dim, dim, sizes in parts_of_ranks(tensor):
        each = -(-sizes[dim] // tensor.device_mesh.size(mesh_dim))
        first[dim] += min(tensor.device_mesh.get_local_rank(mesh_dim) * each, sizes[dim])
    return local, tuple(first)


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's part of a tensor and the index of its first row."""
    local, first = local_part(tensor)
    return local, first[0] if first else 0


def is_held_by_each(tensor: DTensor, machines: Collection[Collection[int]]) -> bool:
    """Return whether each machine has all elements of a tensor.

    Args:
        tensor: divided over ranks.
        machines: the ranks of each.
    """
    holders = _holders(tensor.device_mesh, tensor.placements)
    return all(not ranks.isdisjoint(machine) for machine in machines for ranks in holders.values())


def is_first_holder(tensor: DTensor, machine: Collection[int]) -> bool:
    """Return whether this rank is the first one of ``machine`` with its part of a tensor."""
    coordinate, rank = tensor.device_mesh.get_coordinate(), dist.get_rank()
    assert coordinate is not None
    key = _part_of(coordinate, tensor.placements)
    return rank == min(_holders(tensor.device_mesh, tensor.placements)[key] & {rank, *machine})


def _part_of(coordinate: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return which part of a tensor a rank has, by its coordinate in the mesh."""
    return tuple(i for i, placement in zip(coordinate, placements, strict=True) if divided_dim(placement) is not None)


@functools.lru_cache
def _holders(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[tuple[int, ...], set[int]]:
    """Return the ranks that have each part of a tensor."""
    holders: dict[tuple[int, ...], set[int]] = {}
    for coordinate in itertools.product(*map(range, mesh.shape)):
        holders.setdefault(_part_of(coordinate, placements), set()).add(int(mesh.mesh[coordinate]))
    return holders


def divided_dim(placement: Placement) -> int | None:
    """Return the dimension of a tensor that this placement divides over ranks; None if each of them has a copy.

    FSDP2 has a private placement for weights whose rows tensor parallelism divides too.
    """
    return None if placement.is_replicate() else getattr(placement, "dim", None)


def parts_of_ranks(tensor: DTensor) -> list[tuple[int, int, torch.Size]]:
    """Describe how a tensor is divided, the last division first.

    Each has the dimension of the mesh, that of the tensor, and the size of what was divided there. Dimensions of the
    mesh that come later divide before: the last one is that of tensor parallelism, and FSDP divides what it leaves.
    """
    sizes = list(tensor.shape)
    division: list[tuple[int, int, torch.Size]] = []
    for mesh_dim in reversed(range(tensor.device_mesh.ndim)):
        dim = divided_dim(tensor.placements[mesh_dim])
        if dim is None:
            continue
        division.insert(0, (mesh_dim, dim, torch.Size(sizes)))
        each = -(-sizes[dim] // tensor.device_mesh.size(mesh_dim))
        start = min(tensor.device_mesh.get_local_rank(mesh_dim) * each, sizes[dim])
        sizes[dim] = min(each, sizes[dim] - start)
    return division
