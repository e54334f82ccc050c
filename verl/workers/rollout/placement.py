"""Which ranks share a rollout engine, and on which GPUs it lives."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from verl.errors import ConfigError


def engine_group(ranks_per_engine: int, setting: str) -> tuple[int, bool]:
    """Rank of this process, and whether it leads its engine: ranks that follow each other share one, the first leads.

    Raises:
        ConfigError: the ranks do not divide into engines; ``setting`` names what decides their size.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world_size % ranks_per_engine:
        raise ConfigError(
            f"{setting} does not divide the {world_size} rank(s) of this run: that many ranks share one rollout "
            "engine. Set actor_rollout_ref.rollout.tensor_model_parallel_size to 1, or to a divisor of the number of "
            "ranks."
        )
    return rank, rank % ranks_per_engine == 0


def devices_of_the_engine(rank: int, ranks_per_engine: int, device: torch.device) -> str | None:
    """Ids of the GPUs of all ranks of this engine, as CUDA_VISIBLE_DEVICES takes them; None without GPUs. Collective.

    Raises:
        ConfigError: the ranks live on different machines.
    """
    own = (socket.gethostname(), _device_id(device))
    places = [own]
    if ranks_per_engine > 1:
        places = [own] * dist.get_world_size()
        dist.all_gather_object(places, own)
        first = rank - rank % ranks_per_engine
        places = places[first : first + ranks_per_engine]
        hosts = sorted({host for host, _ in places})
        if len(hosts) > 1:
            raise ConfigError(
                f"ranks {first} to {first + ranks_per_engine - 1} share a rollout engine but live on different "
                f"machines ({', '.join(hosts)}). Use a rollout.tensor_model_parallel_size that divides "
                "trainer.n_gpus_per_node."
            )
    return ",".join(device_id for _, device_id in places) if device.type == "cuda" else None


def _device_id(device: torch.device) -> str:
    """The id by which another process finds the GPU of this rank."""
    index = device.index if device.index is not None else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index].strip() if visible else str(index)
