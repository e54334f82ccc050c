"""Map ranks to rollout engines, GPUs and machines, and exchange values between ranks."""

from __future__ import annotations

import datetime
import itertools
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from verl.errors import ConfigError

T = TypeVar("T")

EXCHANGE_S = 6 * 3600.0
"""Time limit of an exchange: other ranks may still generate or restart an engine. Hangs are detected elsewhere."""


def engine_group(ranks_per_engine: int, setting: str) -> tuple[int, bool]:
    """Return this process's rank, and whether it is the first (leading) one of the ranks that share its engine.

    Raises:
        ConfigError: ``ranks_per_engine`` does not divide the number of ranks; ``setting`` stands in the message.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world_size % ranks_per_engine:
        raise ConfigError(
            f"{setting} does not divide the {world_size} rank(s) of this run: that many ranks share one rollout "
            "engine. Use 1, or a divisor of the number of ranks (tensor_model_parallel_size)."
        )
    return rank, rank % ranks_per_engine == 0


@dataclass(frozen=True)
class EnginePlacement:
    """Machines and devices of the ranks of this rank's engine."""

    devices: str | None
    """GPU ids of the engine's ranks on this machine in the format of CUDA_VISIBLE_DEVICES; None on a CPU."""
    node_rank: int = 0
    """Index of this machine among those of the engine, in the order of ranks."""
    nodes: int = 1
    """Machines of the engine, each with as many of its ranks."""
    leads_node: bool = True
    """True for the first of the engine's ranks on this machine."""

    @classmethod
    def from_rank(cls, rank: int, ranks_per_engine: int, device: torch.device) -> Self:
        """Exchange machines and devices among all ranks. Collective, unless each rank has an engine of its own.

        Raises:
            ConfigError: the engine's machines have different numbers of its ranks.
        """
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        index = device.index or 0
        identity = (machine_identity(), visible[index] if visible and device.type == "cuda" else str(index))
        first, ranks = rank - rank % ranks_per_engine, [identity]
        if ranks_per_engine > 1:
            ranks = [identity] * dist.get_world_size()
            dist.all_gather_object(ranks, identity)
            ranks = ranks[first : first + ranks_per_engine]
        counts = {machine: len(list(same)) for machine, same in itertools.groupby(machine for machine, _ in ranks)}
        if sum(counts.values()) != ranks_per_engine or len(set(counts.values())) > 1:
            hosts = ", ".join(machine.split()[0] for machine, _ in ranks)
            raise ConfigError(
                f"ranks {first} to {first + ranks_per_engine - 1} share a rollout engine, and its machines do not have "
                f"as many of them each (rank by rank: {hosts}). Use a tensor_model_parallel_size that divides "
                "n_gpus_per_node, or is a multiple of it."
            )
        devices = ",".join(device_id for machine, device_id in ranks if machine == identity[0])
        return cls(
            devices if device.type == "cuda" else None,
            [*counts].index(identity[0]),
            len(counts),
            rank == first or ranks[rank - first - 1][0] != identity[0],
        )


class RankExchange:
    """All-gather one integer per rank, over gloo. The constructor and the call are collective."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=EXCHANGE_S))
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    @property
    def is_alone(self) -> bool:
        """True if there is one rank only."""
        return self._group is None

    def __call__(self, value: int) -> list[int]:
        """Return the values of all ranks, in the order of ranks."""
        if self._group is None:
            return [value]
        gathered = [torch.zeros(1, dtype=torch.long) for _ in range(self._group.size())]
        dist.all_gather(gathered, torch.tensor([value]), group=self._group)
        return [int(tensor) for tensor in gathered]


class MachineRanks:
    """The ranks of this machine. The constructor is collective over all ranks, the call over those of the machine.

    Args:
        is_alone: leave the other ranks out; nothing is collective then.
        in_step: calls are collective over all ranks, so that all machines are at the same point.
    """

    def __init__(self, is_alone: bool = False, in_step: bool = False) -> None:
        self.rank, self.size = 0, 1
        """This rank's place among those of the machine, and their number."""
        self._group: dist.ProcessGroup | None = None
        self.machine = machine_identity()
        self.ranks_of_machines: dict[str, list[int]] = {}
        """All ranks of the run by machine; empty if this rank is alone."""
        self._machines = [self.machine]
        """Machine of each rank of the group."""
        if is_alone or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        machines = [self.machine] * dist.get_world_size()
        dist.all_gather_object(machines, self.machine)
        for rank, machine in enumerate(machines):
            self.ranks_of_machines.setdefault(machine, []).append(rank)
        local_ranks = self.ranks_of_machines[self.machine]
        self.rank, self.size = local_ranks.index(dist.get_rank()), len(local_ranks)
        groups = [range(len(machines))] if in_step else [ranks for _, ranks in sorted(self.ranks_of_machines.items())]
        for ranks in groups:
            group = dist.new_group([*ranks], backend="gloo", timeout=datetime.timedelta(seconds=EXCHANGE_S))
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self._group, self._machines = group, [machines[rank] for rank in ranks]

    def __call__(self, value: T) -> list[T]:
        """Return the values of all ranks of the machine, in the order of ranks, when all have called."""
        return [values for machine, values in self._gather(value) if machine == self.machine]

    def by_machine(self, value: T) -> dict[str, T]:
        """Return the value of the first rank of each machine, of this one alone unless ranks are ``in_step``."""
        values: dict[str, T] = {}
        for machine, rank_value in self._gather(value):
            values.setdefault(machine, rank_value)
        return values

    def _gather(self, value: T) -> list[tuple[str, T]]:
        values = [value] * len(self._machines)
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return [*zip(self._machines, values, strict=True)]


def machine_identity() -> str:
    """Identity of the machine, and on it of the processes that can open each other's files by their process ids.

    A node of Ray is a machine, also where several run on one.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    node = os.environ.get("RAY_RAYLET_PID", "-")
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')} {node}"
