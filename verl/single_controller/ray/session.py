"""Ray started for a run, and stopped after it."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

logger = logging.getLogger(__name__)


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
    """
    ours = not ray.is_initialized()
    if ours:
        # Ray would otherwise hide GPUs from actors that ask for none, and warn about it.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(**{name: value for name, value in ray_kwargs.ray_init.items() if value is not None})
    try:
        runner_class().run(config)
    finally:
        if ray_kwargs.timeline_json_file:
            ray.timeline(filename=ray_kwargs.timeline_json_file)
        if ours:
            ray.shutdown()
