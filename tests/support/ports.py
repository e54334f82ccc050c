"""Ports for servers that tests start."""

from __future__ import annotations

import socket

_reserved: list[socket.socket] = []


def reserved_port() -> int:
    """Return a port of the loopback that the kernel gives to nobody else while this process runs.

    A socket has it that never listens. A server may share it, since both set ``SO_REUSEADDR``; without one, connections
    are refused.
    """
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    _reserved.append(one)
    return one.getsockname()[1]
