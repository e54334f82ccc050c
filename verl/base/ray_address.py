"""Addresses of Ray clusters: which one a run connects to, and whether something answers there. Imports no Ray."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(
    [0, 0, 0, 4, 0, 0, 0, 0, 0]
)  # RFC 9113, 3.4; empty SETTINGS


def cluster_address(ray_init: Mapping[str, Any]) -> str:
    """Return the address of the cluster that ``ray.init`` with these arguments connects to; "" if it starts one.

    Without an address it connects to the Ray that ``ray start`` started on this machine.
    """
    address = ray_init.get("address") or "auto"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        return "" if address == "local" else address
    if any(ray_init.get(name) is not None for name in ("num_cpus", "num_gpus", "resources")):
        return ""
    folder = ray_init.get("_temp_dir") or Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray")
    left_behind = Path(folder, "ray_current_cluster")
    return left_behind.read_text().strip() if left_behind.is_file() else ""


def answers(address: str, timeout_s: float) -> bool:
    """Whether a gRPC server answers at ``host:port``; true for addresses of other forms.

    The kernel accepts connections for a process that is stopped, so an accepted connection alone shows nothing.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if "://" in host or not port.isdigit():
        # Ray accepts more kinds of addresses and reports itself what is wrong with this one.
        return True
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return True
            connection.sendall(HTTP2_GREETING)
            return connection.recv(1) != b""
    except OSError:
        return False
