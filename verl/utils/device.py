"""Which device this process computes on, and the process group that its ranks share."""

from __future__ import annotations

import datetime
import os

import psutil
import torch
import torch.distributed as dist

from verl.errors import ResourceError

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def get_device_name() -> str:
    """``"cuda"`` if this process sees a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_device(name: str | None = None) -> torch.device:
    """The device of this rank: its own GPU by ``LOCAL_RANK``, or the CPU.

    Args:
        name: ``"cuda"``, ``"cpu"``, or None for what there is.

    Raises:
        ResourceError: ``"cuda"`` is asked for and this process sees no GPU.
    """
    name = name or get_device_name()
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ResourceError(f"device '{name}' is unknown. Use one of: {', '.join(_BACKENDS)}.")
    if not torch.cuda.is_available():
        raise ResourceError("device 'cuda' is asked for, but this process sees no GPU. Set trainer.device=cpu.")
    # A launcher that shows each process one GPU makes it number 0 everywhere.
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """The ``torch.distributed`` back end for tensors on ``device``."""
    return _BACKENDS[device.type]


def ensure_process_group(device: torch.device, timeout_s: float = 600) -> None:
    """Join the default process group, once per process; colocated workers share it.

    Rank and world size come from the environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
    ``MASTER_PORT``). A single process needs no address and no port.

    Raises:
        ResourceError: there are several ranks and no address at which they meet.
    """
    if dist.is_initialized():
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    timeout = datetime.timedelta(seconds=timeout_s)
    if world_size == 1:
        dist.init_process_group(backend_for(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ResourceError(
            f"WORLD_SIZE={world_size}, but {', '.join(missing)} is not set, so the ranks cannot meet. Start them "
            "through a worker group or torchrun."
        )
    dist.init_process_group(backend_for(device), timeout=timeout)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """``perf/*`` memory in GiB, of the rank that uses most: host memory now; on a GPU the peaks so far. Collective."""
    used = {"perf/cpu_memory_used_gb": float(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        used["perf/max_memory_allocated_gb"] = float(torch.cuda.max_memory_allocated(device))
        used["perf/max_memory_reserved_gb"] = float(torch.cuda.max_memory_reserved(device))
    largest = torch.tensor(list(used.values()), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(used, (largest / 2**30).tolist(), strict=True))
