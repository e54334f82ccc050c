"""Ray started for a run, and stopped after it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import worker as ray_worker

from verl.single_controller.ray.access import prepare_token, secrets_to_environment
from verl.single_controller.ray.address import with_address
from verl.single_controller.ray.processes import dead_nodes
from verl.utils.allocator import keep_freed_memory

logger = logging.getLogger(__name__)

SETTINGS = {
    # Ray would otherwise hide GPUs from actors that ask for none, and warn about it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray collects what is to be freed for a second by default. Batches of that second would each lie in memory that
    # was never written before, and the first write to a page of shared memory costs far more than the copy.
    "RAY_free_objects_period_milliseconds": "10",
}
"""Environment of a Ray that is started here; what the user has set stays."""
_started: list[dict[str, Any]] = []  # what the Ray of this process was started with, if it was started here


def run_task(runner_class: type, config: Any, ray_kwargs: Any) -> None:
    """Drive a run from this process, with Ray around it.

    The driver stays here, where it has the terminal and where its errors are: only the ranks become
    actors. A Ray that runs already (``ray.init`` was called, or ``RAY_ADDRESS`` is set) is used, and the
    former is left running.

    Args:
        runner_class: made without arguments; its ``run(config)`` is the run.
        config: the configuration, for ``run``.
        ray_kwargs: ``ray_init`` are the arguments of ``ray.init``, None meaning not given; into
            ``timeline_json_file`` goes Ray's timeline, if it is set.

    Raises:
        ResourceError: the cluster that is asked for does not answer.
    """
    keep_freed_memory()
    ours = not ray.is_initialized()
    if ours:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        arguments = _init_arguments(ray_kwargs.ray_init)
        if not os.environ.get("RAY_ADDRESS") and arguments.get("address", "local") == "local":
            prepare_token()
            arguments = secrets_to_environment(arguments)
        _start(arguments)
    try:
        runner_class().run(config)
    finally:
        _started.clear()
        if ray_kwargs.timeline_json_file:
            ray.timeline(filename=ray_kwargs.timeline_json_file)
        if ours:
            ray.shutdown()


def restart_if_lost() -> None:
    """Start Ray anew where it was started by :func:`run_task` and its process on this node has died.

    All workers, and all that its object store held, are gone then. A Ray that others started is theirs to mend.
    """
    if not _started or ray.get_runtime_context().get_node_id() not in dead_nodes():
        return
    logger.warning("the process of Ray on this node died; Ray is started anew, and what it held is lost")
    arguments = _started.pop()
    ray.shutdown()
    _start(arguments)


def _start(arguments: dict[str, Any]) -> None:
    ray.init(**arguments)
    if ray_worker._global_node is not None and ray_worker._global_node.is_head():
        _started.append({**arguments, "address": "local"})


def _init_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    return with_address({str(name): value for name, value in given.items() if value is not None})
