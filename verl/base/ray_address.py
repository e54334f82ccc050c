"""Addresses of Ray clusters: which one a run connects to, and whether something answers there. Imports no Ray."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.base.fs import is_private, is_private_status

logger = logging.getLogger(__name__)

MAX_ADDRESS_LENGTH = 300  # characters; a host name has at most 253
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
    return left_behind(ray_init)


def left_behind(ray_init: Mapping[str, Any]) -> str:
    """Return the address that ``ray start`` left on this machine; "" if there is none or another account's."""
    folder = ray_init.get("_temp_dir") or Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray")
    file = Path(folder, "ray_current_cluster")
    if not file.is_file():
        return ""
    # Ray opens its folder for everybody, so the owner of the file counts, too, and others may exchange the file at any
    # time: the one that was checked is read.
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), errors="replace") as opened:
            if is_private_status(os.fstat(opened.fileno())) and is_private(file.parent, may_be_written=True):
                return opened.read(MAX_ADDRESS_LENGTH).strip()
    except OSError:  # a link
        pass
    logger.warning("%s is another account's and is ignored. To join that cluster, set RAY_ADDRESS.", file)
    return ""


def answers(address: str, timeout_s: float) -> bool:
    """Return whether a gRPC server answers at ``host:port``; true for addresses of other forms.

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
