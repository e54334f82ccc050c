"""Map ranks to rollout engines, GPUs and machines, and exchange values between ranks."""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path
from typing import TypeVar

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


def devices_of_the_engine(rank: int, ranks_per_engine: int, device: torch.device) -> str | None:
    """GPU ids of all ranks of this engine in the format of CUDA_VISIBLE_DEVICES; None on a CPU. Collective.

    Raises:
        ConfigError: the engine's ranks are on different machines.
    """
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    index = device.index or 0
    host_and_gpu = (socket.gethostname(), visible[index] if visible and device.type == "cuda" else str(index))
    devices = [host_and_gpu]
    if ranks_per_engine > 1:
        devices = [host_and_gpu] * dist.get_world_size()
        dist.all_gather_object(devices, host_and_gpu)
        first = rank - rank % ranks_per_engine
        devices = devices[first : first + ranks_per_engine]
        hosts = sorted({host for host, _ in devices})
        if len(hosts) > 1:
            raise ConfigError(
                f"ranks {first} to {first + ranks_per_engine - 1} share a rollout engine but live on different "
                f"machines ({', '.join(hosts)}). Use a tensor_model_parallel_size that divides "
                "n_gpus_per_node."
            )
    return ",".join(device_id for _, device_id in devices) if device.type == "cuda" else None


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
        """Whether there is one rank only."""
        return self._group is None

    def __call__(self, value: int) -> list[int]:
        """Return the values of all ranks, in the order of ranks."""
        if self._group is None:
            return [value]
        gathered = [torch.zeros(1, dtype=torch.long) for _ in range(self._group.size())]
        dist.all_gather(gathered, torch.tensor([value]), group=self._group)
        return [int(one) for one in gathered]


class MachineRanks:
    """The ranks of this machine. The constructor is collective over all ranks, the call over those of the machine.

    Args:
        is_alone: leave the other ranks out; nothing is collective then.
    """

    def __init__(self, is_alone: bool = False) -> None:
        self.rank, self.size = 0, 1
        """This rank's place among those of the machine, and their number."""
        self._group: dist.ProcessGroup | None = None
        if is_alone or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        machines = [machine_identity()] * dist.get_world_size()
        dist.all_gather_object(machines, machine_identity())
        for machine in sorted(set(machines)):
            ranks = [rank for rank, of_rank in enumerate(machines) if of_rank == machine]
            group = dist.new_group(ranks, backend="gloo", timeout=datetime.timedelta(seconds=EXCHANGE_S))
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self.rank, self.size, self._group = ranks.index(dist.get_rank()), len(ranks), group

    def __call__(self, value: T) -> list[T]:
        """Return the values of all ranks of the machine, in the order of ranks, when all have called."""
        if self._group is None:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def machine_identity() -> str:
    """Identity of the machine, and on it of the processes that can open each other's files by their process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
