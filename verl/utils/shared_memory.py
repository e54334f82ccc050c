"""Memory that several processes of one machine see, made by the ranks of a process group together."""

from __future__ import annotations

import os
import secrets

import torch
import torch.distributed as dist
from torch import Tensor

_NOTHING = (-1, -1, -1)


def shared_memory(nbytes: int, group: dist.ProcessGroup) -> Tensor | None:
    """Zeros that every rank of ``group`` sees and may write; None if the ranks share no machine. Collective.

    The memory has no name in any file system (see memfd_create(2)), so no limit of ``/dev/shm`` holds for it and
    nothing is left behind: it goes with the last tensor that was made of it, or with its process. Pages are taken as
    they are written.

    Args:
        nbytes: at least 1.
        group: of CPU ranks.

    Returns:
        (nbytes,) uint8; None on every rank if one of them cannot see it: another machine or container, another user,
        a system that is not Linux.
    """
    descriptor, offer = -1, _NOTHING
    if dist.get_rank(group) == 0 and hasattr(os, "memfd_create"):
        token = secrets.randbits(62)
        descriptor = os.memfd_create(_name(token))
        os.ftruncate(descriptor, nbytes)
        offer = os.getpid(), descriptor, token
    try:
        given = torch.tensor(offer, dtype=torch.int64)
        dist.broadcast(given, group=group, group_src=0)
        process, number, token = given.tolist()
        memory = _opened(f"/proc/{process}/fd/{number}", _name(token), nbytes)
        everywhere = torch.tensor(int(memory is not None))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)  # all have opened it, or never will
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
        os.close(os.open(path, os.O_RDWR))  # says why not, which PyTorch would put into words
    except OSError:
        return None
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
