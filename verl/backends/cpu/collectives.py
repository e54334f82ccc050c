"""FSDP2's all-gather and reduce-scatter through shared memory, for ranks on one machine.

A rank copies its part into shared memory, all ranks pass a barrier, and each reads what it needs. gloo would send the
same bytes through sockets, and its reduce-scatter is a full all-reduce, most of which each rank discards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from verl.backends.cpu.shared_memory import shared_memory

logger = logging.getLogger(__name__)

# Bytes that a rank publishes at a time: small enough to be read from a cache, large enough that barriers cost little.
_SLOT_BYTES = 4 << 20


class Exchange:
    """Shared memory, uint8, in which each rank of a group writes a slot that the others read."""

    def __init__(self, memory: Tensor, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        # Two alternating slots: between reading one and writing it again every rank has passed a barrier.
        self._slots = memory.view(2, self.ranks, -1)
        self._turn = 0

    @classmethod
    def from_group(cls, group: dist.ProcessGroup) -> Exchange | None:
        """Allocate the memory for ``group``; None if its ranks cannot share any. Collective."""
        memory = shared_memory(2 * dist.get_world_size(group) * _SLOT_BYTES, group)
        return None if memory is None else cls(memory, group)

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements that fit into a slot."""
        return self._slots.shape[-1] // dtype.itemsize

    def publish(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Write (n,) tensors into this rank's slot and wait for all ranks. Collective.

        Returns:
            for each rank what it published, (parts, n); valid until the next call.
        """
        slots = self._slots[self._turn].view(parts[0].dtype)
        self._turn = 1 - self._turn
        count, n = len(parts), len(parts[0])
        published = slots[:, : count * n].unflatten(1, (count, n))
        for target, part in zip(published[self.rank], parts, strict=True):
            target.copy_(part)
        dist.barrier(group=self.group)
        return list(published)


class FrozenWeights:
    """Periods in which no weight changes, so that each rank publishes its rows only once.

    Ranks then wait for each other in the first of several passes, instead of at each layer of each pass.

    Args:
        group: ranks among which the weights are sharded.
        keeps_copy: whether the machine has room for one more copy of the weights, shared by all ranks; if not,
            periods have no effect.
    """

    def __init__(self, group: dist.ProcessGroup, keeps_copy: bool) -> None:
        self._group, self._keeps_copy = group, keeps_copy
        self._count, self._is_on = 0, False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Begin a period; no weight may change inside. Collective."""
        dist.barrier(group=self._group)  # no rank still reads what was published in the last period
        self._count, self._is_on = self._count + 1, self._keeps_copy
        try:
            yield
        finally:
            self._is_on = False

    @property
    def period(self) -> int | None:
        """Number of the current period; None if weights may change."""
        return self._count if self._is_on else None


class SharedAllGather:
    """All-gather for one FSDP2 unit; see ``FSDPModule.set_custom_all_gather``."""

    def __init__(self, exchange: Exchange, frozen: FrozenWeights) -> None:
        self._exchange, self._frozen = exchange, frozen
        self._published: Tensor | None = None
        """(ranks, n) rows of all ranks, published in period ``_published_in``."""
        self._published_in: int | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the output of an all-gather."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Copy the (n,) ``input_tensor`` of each rank r to ``output_tensor[r * n : (r + 1) * n]``."""
        exchange = self._exchange
        output = output_tensor.view(exchange.ranks, -1)
        local_part = output[exchange.rank]
        if local_part.data_ptr() != input_tensor.data_ptr():
            local_part.copy_(input_tensor)
        other_ranks = [rank for rank in range(exchange.ranks) if rank != exchange.rank]
        period = self._frozen.period
        if period is not None and (published := self._memory_for(output)) is not None:
            if self._published_in != period:
                published[exchange.rank].copy_(local_part)
                dist.barrier(group=exchange.group)
                self._published_in = period
            for rank in other_ranks:
                output[rank].copy_(published[rank])
            return
        for target in output.split(exchange.capacity(output.dtype), dim=1):
            parts = exchange.publish([target[exchange.rank]])
            for rank in other_ranks:
                target[rank].copy_(parts[rank][0])

    def _memory_for(self, output: Tensor) -> Tensor | None:
        """Return the shared copy of this unit. Collective at its first call, which allocates it."""
        # Allocated once: a unit has the same size and format every time.
        if self._published is None and output.nbytes:
            memory = shared_memory(output.nbytes, self._exchange.group)
            self._published = None if memory is None else memory.view(output.dtype).view(output.shape)
        return self._published


class SharedReduceScatter:
    """Reduce-scatter for FSDP2 units, adding in the order of ranks; see ``FSDPModule.set_custom_reduce_scatter``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the output of a reduce-scatter."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Write the sum or mean over ranks of part r of ``input_tensor`` into rank r's (n,) ``output_tensor``.

        Raises:
            ValueError: ``op`` is neither SUM nor AVG.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"gradients are summed or averaged over ranks, not reduced by {op}.")
        exchange = self._exchange
        other_ranks = [rank for rank in range(exchange.ranks) if rank != exchange.rank]
        room = exchange.capacity(input_tensor.dtype) // len(other_ranks)
        parts = input_tensor.view(exchange.ranks, -1).split(room, dim=1)
        for part, output in zip(parts, output_tensor.split(room), strict=True):
            published = exchange.publish([part[rank] for rank in other_ranks])
            # A rank publishes no part for itself, so the parts after its own have moved up by one.
            parts_of_others = [published[rank][exchange.rank - (exchange.rank > rank)] for rank in other_ranks]
            parts_of_others.insert(exchange.rank, part[exchange.rank])
            torch.add(parts_of_others[0], parts_of_others[1], out=output)
            for more in parts_of_others[2:]:
                output.add_(more)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(exchange.ranks)


def use_shared_memory(units: Iterable[FSDPModule], group: dist.ProcessGroup, keeps_copy: bool) -> FrozenWeights | None:
    """Make the FSDP units of a model exchange through memory shared by the ranks of ``group``. Collective.

    Returns:
        the context with which to mark periods of unchanging weights; None if the ranks cannot share memory, so that
        gloo stays in use.
    """
    exchange = Exchange.from_group(group)
    if exchange is None:
        logger.info("no shared memory between ranks: weights and gradients are sent with gloo, which is slower")
        return None
    frozen = FrozenWeights(group, keeps_copy)
    scatter: Any = SharedReduceScatter(exchange)
    for unit in units:
        gather: Any = SharedAllGather(exchange, frozen)
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
    return frozen
