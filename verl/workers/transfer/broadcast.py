"""Transport by broadcasts from the sender: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import RolloutError
from verl.workers.rollout.weights import SharedBuffer, SharedPart
from verl.workers.transfer.link import Link
from verl.workers.transfer.transport import Participant, Sent, WeightTransport, register_transfer

_PIECE_BYTES = 2**30
"""Bytes of one broadcast."""
_LIMIT = datetime.timedelta(minutes=30)


class Broadcasts:
    """A process group of the sender and one rank of each receiving machine, beside their default groups.

    Args:
        participant: the processes; all make this object together.
        link: where they meet.
    """

    def __init__(self, participant: Participant, link: Link) -> None:
        self.is_sender = participant.rank == 0
        self.device = participant.device
        # Connecting cannot be given up, so each process waits, as long as it can be, until all others are there.
        link.write(f"joins/{participant.rank}", True)
        for rank in range(participant.size):
            link.read(f"joins/{rank}")
        store = dist.PrefixStore(f"{link.transfer}/group", link.store)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _LIMIT
            self._group: Any = dist.ProcessGroupNCCL(  # whose annotations have no collectives
                store, participant.rank, participant.size, options
            )
            # NCCL connects in the first collective, whose call returns when all are in it. Receivers call a broadcast
            # only when they are told of it, which is after the sender's call has returned: so not in a broadcast.
            self._group.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), 0).wait()
        else:
            self._group = dist.ProcessGroupGloo(store, participant.rank, participant.size, _LIMIT)

    def start(self, memory: Tensor) -> list[dist.Work]:
        """Begin to broadcast ``memory``, uint8 on :attr:`device`, from the sender."""
        try:
            return [self._group.broadcast(piece, 0) for piece in memory.split(_PIECE_BYTES)]
        except RuntimeError as error:  # gloo and NCCL raise no narrower one
            raise RolloutError(f"the transfer of weights was cut off: {error}") from error

    def close(self) -> None:
        """End the connections; others notice it if they still wait."""
        self._group.abort()


class Staging(SharedBuffer):
    """Two pieces of memory in turn: one is filled while the other is sent.

    Args:
        device: of the memory.
        broadcast: what sends it.
    """

    def __init__(self, device: torch.device, broadcast: Broadcast) -> None:
        super().__init__()
        self._device, self._broadcast = device, broadcast
        self._pieces = [torch.empty(0, dtype=torch.uint8)] * 2
        self._turn = 0

    def _location(self) -> Mapping[str, str]:
        return {}

    def _has_room(self, size: int) -> bool:
        return size <= len(self._memory)

    def _make_room(self, size: int, part_bytes: int) -> None:
        self._turn = 1 - self._turn
        self._broadcast.wait_until_sent(all_but=1)
        if len(self._pieces[self._turn]) < size:
            self._pieces[self._turn] = torch.empty(0, dtype=torch.uint8)  # before the larger one is allocated
            self._pieces[self._turn] = torch.empty(max(size, part_bytes), dtype=torch.uint8, device=self._device)
        self._memory = self._pieces[self._turn]


@register_transfer("nccl")
class Broadcast(WeightTransport):
    """Sends whole parts; the next part is gathered while one is sent."""

    def __init__(self, participant: Participant) -> None:
        super().__init__(participant)
        self._staging = Staging(participant.device, self)
        self._broadcasts: Broadcasts | None = None
        self._sends: list[tuple[list[dist.Work], Tensor]] = []
        """Broadcasts that have begun, each with its memory."""

    def begin(self) -> None:
        """See :meth:`WeightTransport.begin`. The first time it connects the processes."""
        if self._broadcasts is None:
            self._broadcasts = Broadcasts(self.participant, self.link)

    def buffer(self, section: str) -> SharedBuffer:
        """See :meth:`WeightTransport.buffer`."""
        return self._staging

    def send(self, section: str, index: int, part: SharedPart) -> Sent:
        """See :meth:`WeightTransport.send`."""
        self.start(part.memory)
        return Sent(len(part.memory))

    def start(self, memory: Tensor) -> None:
        """Begin to send ``memory``, which must stay until it is sent."""
        assert self._broadcasts is not None
        self._sends.append((self._broadcasts.start(memory), memory))

    def wait_until_sent(self, all_but: int = 0) -> None:
        """Wait until no more than the last ``all_but`` parts are under way."""
        while len(self._sends) > all_but:
            works, _ = self._sends.pop(0)
            for work in works:
                self.link.wait(work)

    def wait(self) -> None:
        """See :meth:`WeightTransport.wait`."""
        self.wait_until_sent()

    def receive(self, message: Mapping[str, Any], memory: Tensor) -> None:
        """See :meth:`WeightTransport.receive`."""
        device = self.participant.device
        if device.type == "cpu":
            self.fetch(memory)
            return
        for piece in memory.split(_PIECE_BYTES):
            scratch = torch.empty(len(piece), dtype=torch.uint8, device=device)
            self.fetch(scratch)
            piece.copy_(scratch)

    def fetch(self, memory: Tensor) -> None:
        """Receive what the sender gave to :meth:`start`, of the size of ``memory``."""
        assert self._broadcasts is not None
        for work in self._broadcasts.start(memory):
            self.link.wait(work)

    def close(self) -> None:
        """See :meth:`WeightTransport.close`."""
        self._sends.clear()
        if self._broadcasts is not None:
            self._broadcasts.close()
            self._broadcasts = None
