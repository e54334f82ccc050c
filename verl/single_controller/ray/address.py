"""Which Ray a run joins: whether the one that is asked for, or that left its address behind, is there at all."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from ray._private.utils import read_ray_address

from verl.errors import ResourceError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""How long a cluster may take to accept a connection."""


def with_address(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``ray.init`` that lead to a Ray which answers.

    Ray itself would try for minutes to reach one that is gone, and then end the process.

    Args:
        arguments: as given; those that say how large a Ray shall be start one.

    Raises:
        ResourceError: nobody listens at the address that is given, here or in ``RAY_ADDRESS``.
    """
    given = arguments.get("address", "auto")
    named = (os.environ.get("RAY_ADDRESS") or "auto") if given == "auto" else given
    if named not in ("auto", "local") and not _answers(named):
        raise ResourceError(
            f"no Ray answers at {named} (from RAY_ADDRESS or ray_kwargs.ray_init.address): the cluster has ended, or "
            "cannot be reached from here. Start it (ray start --head), or unset the address: the run then starts a Ray "
            "of its own."
        )
    if named != "auto" or "address" in arguments:
        return dict(arguments)
    if arguments.keys() & {"num_cpus", "num_gpus", "resources"}:
        # A cluster that runs has its size, and Ray refuses another one.
        return {**arguments, "address": "local"}
    left_behind = read_ray_address(arguments.get("_temp_dir"))
    if left_behind and not _answers(left_behind):
        logger.warning("a Ray at %s left its address behind and is gone; a new one is started", left_behind)
        return {**arguments, "address": "local"}
    return dict(arguments)


def _answers(address: str) -> bool:
    """Whether somebody listens at ``host:port``."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if "://" in host or not port.isdigit():
        # Ray knows more kinds of addresses, and says what is wrong with this one.
        return True
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
