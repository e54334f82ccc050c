"""Shared memory for the ranks of a process group on one machine."""

from __future__ import annotations

import os
import secrets

import torch
import torch.distributed as dist
from torch import Tensor

_NOTHING = (-1, -1, -1)


def shared_memory(nbytes: int, group: dist.ProcessGroup) -> Tensor | None:
    """Allocate zeros that every rank of ``group`` can read and write. Collective.

    The memory is anonymous (memfd_create(2)): the size limit of ``/dev/shm`` does not apply, and it is freed with the
    last tensor over it, also when processes are killed. Pages are taken when they are first written.

    Args:
        nbytes: at least 1.
        group: a group with a CPU backend.

    Returns:
        (nbytes,) uint8; None on every rank if one of them cannot open it: another machine, container or user, or a
        system that is not Linux.
    """
    descriptor, offer = -1, _NOTHING
    if dist.get_rank(group) == 0 and hasattr(os, "memfd_create"):
        token = secrets.randbits(62)
        descriptor = os.memfd_create(_name(token))
        os.ftruncate(descriptor, nbytes)
        offer = os.getpid(), descriptor, token
    try:
        offers = torch.tensor(offer, dtype=torch.int64)
        dist.broadcast(offers, group=group, group_src=0)
        process, fd, token = offers.tolist()
        memory = _opened(f"/proc/{process}/fd/{fd}", _name(token), nbytes)
        everywhere = torch.tensor(int(memory is not None))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)  # after this rank 0 may close it
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return memory if everywhere else None


def _name(token: int) -> str:
    return f"verl-{token:x}"


def _opened(path: str, name: str, nbytes: int) -> Tensor | None:
    try:
        # On another machine the same path may lead to another file; none has this name.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            return None
        os.close(os.open(path, os.O_RDWR))  # an OSError here; torch.from_file would raise RuntimeError
    except OSError:
        return None
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
