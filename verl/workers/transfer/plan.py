"""Messages between the driver of a transfer and the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl.workers.rollout.ranks import machine_identity
from verl.workers.transfer.link import StoreAddress


@dataclass(frozen=True)
class RankFacts:
    """Facts about a rank that the driver needs before a transfer."""

    machine: str
    """Identity of the machine, equal on ranks that can open each other's files."""
    pid: int
    held: Mapping[str, str]
    """Digests of the weights that it has received, by section."""

    @classmethod
    def from_this_process(cls, held: Mapping[str, str]) -> RankFacts:
        """Collect those of the calling process."""
        return cls(machine_identity(), os.getpid(), dict(held))


@dataclass(frozen=True)
class TransferPlan:
    """Description of one transfer, which all ranks of both groups receive."""

    version: int
    """Number of the weights; at least 0."""
    transport: str
    """Name of the registered transport."""
    address: StoreAddress
    transfer: str
    """Name of this transfer within its session."""
    machines: Sequence[int]
    """Index of the machine of each receiving rank. The first rank of a machine receives for all of it."""
    held: Mapping[str, str]
    """Digests of the sections that all receiving ranks hold alike."""

    @property
    def is_in_process(self) -> bool:
        """True if sender and receiver are one process, which sends everything before it receives."""
        return self.address.port is None

    def leader_of(self, rank: int) -> int:
        """Return the rank that receives for the machine of a receiving rank."""
        return self.machines.index(self.machines[rank])

    @property
    def leaders(self) -> list[int]:
        """The first receiving rank of each machine."""
        return sorted({self.leader_of(rank) for rank in range(len(self.machines))})


@dataclass
class TransferReport:
    """Size of a transfer, counted where it was sent from."""

    bytes_sent: int = 0
    """Bytes that each receiving machine was sent."""
    bytes_of_weights: int = 0
    """Bytes of the weights that were given: all, or the adapters of a model whose base the receivers hold."""
