"""What ranks on one machine exchange goes through memory that they share: FSDP's collectives, and whole weights.

gloo sends the same bytes through sockets, and its reduce-scatter is an all-reduce of which each rank throws most away.
Here a rank copies its part to where the others see it, all meet, and each reads what it needs.
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


class Steadiness:
    """When weights stay as they are: then each rank shows its rows once, and the others read them whenever they like.

    So ranks wait for each other in the first of several passes only, and not at each layer of each.

    Args:
        group: of the ranks.
        is_cheap: whether the machine has room for one more copy of the weights, for all ranks together.
    """

    def __init__(self, group: dist.ProcessGroup, is_cheap: bool) -> None:
        self._group, self._is_cheap = group, is_cheap
        self._count, self._is_on = 0, False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """No weight changes inside. Collective."""
        meet(self._group)  # nobody reads what was shown before
        self._count, self._is_on = self._count + 1, self._is_cheap
        try:
            yield
        finally:
            self._is_on = False

    @property
    def period(self) -> int | None:
        """Number of the present period; None if weights may change."""
        return self._count if self._is_on else None


class SharedAllGather:
    """All-gather of one unit of FSDP2; see ``FSDPModule.set_custom_all_gather``.

    Args:
        exchange: between its ranks.
        steadiness: of the weights.
    """

    def __init__(self, exchange: Exchange, steadiness: Steadiness) -> None:
        self._exchange, self._steadiness = exchange, steadiness
        self._shown: Tensor | None = None
        """(ranks, n) what the ranks show while weights stay as they are."""
        self._shown_in: int | None = None

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
        others = [rank for rank in range(exchange.ranks) if rank != exchange.rank]
        period = self._steadiness.period
        if period is not None and (shown := self._memory_for(output)) is not None:
            if self._shown_in != period:
                shown[exchange.rank].copy_(own)
                meet(exchange.group)
                self._shown_in = period
            for rank in others:
                output[rank].copy_(shown[rank])
            return
        for place in output.split(exchange.room(output.dtype), dim=1):
            parts = exchange.show([place[exchange.rank]])
            for rank in others:
                place[rank].copy_(parts[rank][0])

    def _memory_for(self, output: Tensor) -> Tensor | None:
        """Made once: a unit has the same size and format every time. Collective then."""
        if self._shown is None and output.nbytes:
            memory = shared_memory(output.nbytes, self._exchange.group)
            self._shown = None if memory is None else memory.view(output.dtype).view(output.shape)
        return self._shown


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


def use_shared_memory(units: Iterable[FSDPModule], group: dist.ProcessGroup, is_cheap: bool) -> Steadiness | None:
    """Let FSDP's units exchange through shared memory; None if the ranks share no machine. Collective.

    Args:
        units: of a model.
        group: that shares its rows.
        is_cheap: as for :class:`Steadiness`.

    Returns:
        how to say when the weights stay as they are.
    """
    exchange = Exchange.of(group)
    if exchange is None:
        logger.info("ranks share no memory: weights and gradients travel through gloo")
        return None
    steadiness = Steadiness(group, is_cheap)
    scatter: Any = SharedReduceScatter(exchange)
    for unit in units:
        gather: Any = SharedAllGather(exchange, steadiness)
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
    return steadiness
