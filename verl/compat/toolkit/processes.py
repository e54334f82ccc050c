"""Addresses and ports of a process, its process group, and the CPU cores near its GPU."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import string
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from verl.utils.device import ensure_process_group, get_device


def get_random_string(length: int) -> str:
    """Return random letters and digits, for names that no other process has."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def is_ipv4(ip_str: str) -> bool:
    """Return whether the text is an IPv4 address."""
    return _version(ip_str) == 4


def is_ipv6(address: str) -> bool:
    """Return whether the text is an IPv6 address."""
    return _version(address) == 6


def _version(text: str) -> int | None:
    try:
        return ipaddress.ip_address(text).version
    except ValueError:
        return None


def get_free_port(address: str, with_alive_sock: bool = True) -> tuple[int, socket.socket | None]:
    """Return a free TCP port of this machine and the socket that holds it.

    Close the socket right before the port is used. With ``with_alive_sock=False`` it is closed already, and None.
    """
    family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((address, 0))
    port = holder.getsockname()[1]
    if with_alive_sock:
        return port, holder
    holder.close()
    return port, None


def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
    """Join the default process group, of a launcher such as torchrun; return local rank, rank and world size."""
    initialize_global_process_group_ray(timeout_second)
    return int(os.environ.get("LOCAL_RANK", "0")), dist.get_rank(), dist.get_world_size()


def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
    """Join the default process group, unless this process has; ranks come from the environment of the worker.

    Args:
        timeout_second: limit of a collective; by default ten minutes.
        backend: of PyTorch's collectives; by default the one for this process's device.
    """
    ensure_process_group(get_device(), 600 if timeout_second is None else timeout_second, backend)


def destroy_global_process_group() -> None:
    """Leave the default process group, if this process is in it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_numa_affinity() -> None:
    """Let this process run on the CPU cores near its GPU only; nothing without a GPU, or where Linux names no cores."""
    if not torch.cuda.is_available():
        return
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    listed = Path("/sys/bus/pci/devices") / address / "local_cpulist"
    if not listed.is_file():
        return
    near = parse_cores(listed.read_text())
    if allowed := near & os.sched_getaffinity(0):  # a container may have none of them
        os.sched_setaffinity(0, allowed)


def parse_cores(text: str) -> set[int]:
    """Parse Linux's list of cores: ``0-2,8`` is 0, 1, 2 and 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


@contextlib.contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable for the block, and restore what it was."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
