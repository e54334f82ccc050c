"""What ranks on one machine exchange goes through memory that they share: FSDP's collectives, and whole weights.

gloo sends the same bytes through sockets, and its reduce-scatter is an all-reduce of which each rank throws most away.
Here a rank copies its part to where the others see it, all meet, and each reads what it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from verl.utils.shared_memory import shared_memory

logger = logging.getLogger(__name__)

_SLOT_BYTES = 4 << 20
"""What a rank shows at a time: little enough to be read from a cache, and so much that meeting costs little of it."""


class Exchange:
    """A slot for each rank of a group, which the others read.

    Args:
        memory: uint8, the same on all ranks.
        group: of the ranks.
    """

    def __init__(self, memory: Tensor, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        # Two slots by turns: who writes the one has met all others since they read it last.
        self._slots = memory.view(2, self.ranks, -1)
        self._turn = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Exchange | None:
        """None if the ranks share no machine. Collective."""
        memory = shared_memory(2 * dist.get_world_size(group) * _SLOT_BYTES, group)
        return None if memory is None else cls(memory, group)

    def room(self, dtype: torch.dtype) -> int:
        """Numbers that fit into a slot."""
        return self._slots.shape[-1] // dtype.itemsize

    def show(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Put (n,) tensors into the own slot, one after the other, and wait for all ranks. Collective.

        Returns:
            of each rank what it shows, (parts, n); it stays until the next call.
        """
        slots = self._slots[self._turn].view(parts[0].dtype)
        self._turn = 1 - self._turn
        count, n = len(parts), len(parts[0])
        shown = slots[:, : count * n].unflatten(1, (count, n))
        for place, part in zip(shown[self.rank], parts, strict=True):
            place.copy_(part)
        meet(self.group)
        return list(shown)


def meet(group: dist.ProcessGroup) -> None:
    """Wait until all ranks of ``group`` are here."""
    dist.barrier(group=group)


class SharedAllGather:
    """FSDP2's all-gather; see ``FSDPModule.set_custom_all_gather``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Put the (n,) ``input_tensor`` of rank r to ``output_tensor[r * n : (r + 1) * n]``."""
        exchange = self._exchange
        output = output_tensor.view(exchange.ranks, -1)
        own = output[exchange.rank]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        places = output.split(exchange.room(output.dtype), dim=1)
        for place in places:
            shown = exchange.show([place[exchange.rank]])
            for rank, (part,) in enumerate(shown):
                if rank != exchange.rank:
                    place[rank].copy_(part)


class SharedReduceScatter:
    """FSDP2's reduce-scatter; see ``FSDPModule.set_custom_reduce_scatter``. Sums go in the order of ranks."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Put the sum over ranks, or the mean, of part r of ``input_tensor`` into rank r's (n,) ``output_tensor``.

        Raises:
            ValueError: ``op`` is neither SUM nor AVG.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"gradients are summed or averaged over ranks, not reduced by {op}.")
        exchange = self._exchange
        others = [rank for rank in range(exchange.ranks) if rank != exchange.rank]
        room = exchange.room(input_tensor.dtype) // len(others)
        parts = input_tensor.view(exchange.ranks, -1).split(room, dim=1)
        for part, output in zip(parts, output_tensor.split(room), strict=True):
            shown = exchange.show([part[rank] for rank in others])
            # A rank shows nothing to itself: what comes after it has moved up by one.
            found = [shown[rank][exchange.rank - (exchange.rank > rank)] for rank in others]
            found.insert(exchange.rank, part[exchange.rank])
            torch.add(found[0], found[1], out=output)
            for more in found[2:]:
                output.add_(more)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(exchange.ranks)


def use_shared_memory(units: Iterable[FSDPModule], group: dist.ProcessGroup) -> bool:
    """Let FSDP's units exchange through shared memory; False if the ranks share no machine. Collective."""
    exchange = Exchange.of(group)
    if exchange is None:
        logger.info("ranks share no memory: weights and gradients travel through gloo")
        return False
    gather: Any = SharedAllGather(exchange)
    scatter: Any = SharedReduceScatter(exchange)
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
    return True
