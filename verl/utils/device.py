"""The device of this process, its ``torch.distributed`` process group, and metrics of memory."""

from __future__ import annotations

import datetime
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl.errors import ResourceError

logger = logging.getLogger(__name__)

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

is_cuda_available: bool = torch.cuda.is_available()
"""True if this process sees a GPU of CUDA (or ROCm)."""
is_npu_available = False
"""Ascend NPUs are not among the devices of this version."""


def get_device_name() -> str:
    """Return ``"cuda"`` if this process sees a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_device(name: str | None = None) -> torch.device:
    """Return the device of this rank and make its GPU, chosen by ``LOCAL_RANK``, the current one.

    ``name`` is ``"cuda"`` (an error without a GPU), ``"cpu"``, or None for a GPU if there is one.
    """
    name = name or get_device_name()
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ResourceError(f"device '{name}' is unknown. Use one of: {', '.join(_BACKENDS)}.")
    if not torch.cuda.is_available():
        raise ResourceError("device 'cuda' is asked for, but this process sees no GPU. Set device=cpu.")
    # Modulo, because a launcher may show each process only its own GPU, which then has index 0.
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """Return the ``torch.distributed`` backend for tensors on ``device``."""
    return _BACKENDS[device.type]


def ensure_process_group(device: torch.device, timeout_s: float = 600, backend: str | None = None) -> None:
    """Initialise the default process group unless there is one; ``backend`` is by default that of the device.

    Several ranks read ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` from the environment.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else all pairs connect now, by 8·n³ bytes of rank 0's store
    if dist.is_initialized():
        return
    backend = backend or backend_for(device)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    timeout = datetime.timedelta(seconds=timeout_s)
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ResourceError(
            f"WORLD_SIZE={world_size}, but {', '.join(missing)} is not set, so the ranks cannot meet. Start them "
            "through a worker group or torchrun."
        )
    if world_size > int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
        use_interface_to(os.environ["MASTER_ADDR"])
    dist.init_process_group(backend, timeout=timeout)


def group_timeout(device: torch.device) -> datetime.timedelta:
    """Return the time limit of collectives in the default process group."""
    return dist.distributed_c10d._get_default_group()._get_backend(device).options._timeout


def limit_groups(mesh: DeviceMesh, device: torch.device) -> DeviceMesh:
    """Give all groups of ``mesh`` the time limit of the default group; PyTorch's own is 10 minutes for NCCL."""
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(group_timeout(device), group)
    return mesh


def use_interface_to(master: str) -> None:
    """Let gloo and NCCL use the network interface by which this machine reaches ``master``, unless the user chose.

    Otherwise gloo binds the address of the host's name, which may be 127.0.1.1 or one that other machines cannot reach.
    """
    address = address_towards(master)
    addresses = {name: {entry.address for entry in entries} for name, entries in psutil.net_if_addrs().items()}
    interface = next((name for name, interface_addresses in addresses.items() if address in interface_addresses), None)
    if interface is None:
        logger.warning(
            "no network interface has the address %s by which this machine reaches %s. If ranks do not meet, set "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each machine.",
            address,
            master,
        )
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)


def address_towards(master: str) -> str:
    """Return the address of this machine by which ``master``, a name or an address, is reached."""
    with socket.socket(socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((master, 1))  # UDP: sends nothing, and chooses a route
        return probe.getsockname()[0]


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Maximum over ranks of the memory in use on their machine and, on a GPU, of its peak, in GiB. Collective."""
    used = {"perf/cpu_memory_used_gb": float(psutil.virtual_memory().used)}
    if device.type == "cuda":
        used["perf/max_memory_allocated_gb"] = float(torch.cuda.max_memory_allocated(device))
        used["perf/max_memory_reserved_gb"] = float(torch.cuda.max_memory_reserved(device))
    largest = torch.tensor(list(used.values()), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(used, (largest / 2**30).tolist(), strict=True))


# ---- for users' workers ---------------------------------------------------------------------------


def get_torch_device() -> ModuleType:
    """Return ``torch.cuda``, or ``torch.cpu`` without a GPU."""
    return getattr(torch, get_device_name())


def get_device_id() -> int | str:
    """Return the index of the current GPU, or ``"cpu"``: in both cases what ``tensor.to`` takes."""
    return get_torch_device().current_device()


def get_nccl_backend() -> str:
    """Return the backend of collectives on this process's device: ``nccl``, or ``gloo`` without a GPU."""
    return "nccl" if get_device_name() == "cuda" else "gloo"


def get_resource_name() -> str:
    """Return the name under which Ray counts this device: ``GPU``, or ``CPU`` without one."""
    return "GPU" if get_device_name() == "cuda" else "CPU"


def get_visible_devices_keyword() -> str:
    """Return the environment variable that lists the GPUs which a process sees."""
    return "CUDA_VISIBLE_DEVICES"


def auto_set_device(config: object) -> None:
    """Set ``config.trainer.device`` in place to ``cpu`` if it says ``cuda`` and there is no GPU.

    A frozen configuration stays as it is: verl's own commands resolve its device when they start workers.
    """
    from omegaconf import DictConfig, open_dict

    if not isinstance(config, DictConfig) or config.get("trainer") is None:
        return
    requested, detected = config.trainer.get("device"), get_device_name()
    if requested not in (None, "cpu", detected):
        logger.warning("trainer.device=%s, and this machine has no such device: the run uses %s.", requested, detected)
        with open_dict(config):
            config.trainer.device = detected


auto_set_ascend_device_name = auto_set_device  # its name before verl 0.6


def set_expandable_segments(enable: bool) -> None:
    """Let PyTorch's CUDA allocator grow its segments (less fragmentation) or not; its other settings stay."""
    # PyTorch sets what a text leaves out to its defaults, so the text has the settings of now.
    settings = re.sub(r"(?i)\s*expandable_segments\s*:\s*\w+\s*,?", "", torch._C._accelerator_getAllocatorSettings())
    settings = ",".join(filter(None, [settings.rstrip(", "), f"expandable_segments:{enable}"]))
    torch._C._accelerator_setAllocatorSettings(settings)


@contextmanager
def one_allocation() -> Iterator[None]:
    """Allocate GPU memory as one piece, which another process can open by a handle, whatever the user has set.

    Pieces of PyTorch's expandable segments go to another process as file descriptors, which containers forbid.
    """
    settings = torch._C._accelerator_getAllocatorSettings()
    set_expandable_segments(False)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
