"""Rollout engines that are programs of their own: are they there, and do the ranks divide among them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.problems import Problem

Problems = Iterator[Problem]

OTHER_PROGRAMS = ("vllm", "sglang")
"""Engines that are packages of the same name, here or in another environment."""


def other_programs(config: PPOConfig | GenerationConfig) -> Problems:
    """The engine can be started, and every group of its ranks is on one machine."""
    is_ppo = isinstance(config, PPOConfig)
    rollout, at = (config.actor_rollout_ref.rollout, "actor_rollout_ref.") if is_ppo else (config.rollout, "")
    if rollout.name not in OTHER_PROGRAMS:
        return
    key = f"{at}rollout.engine_kwargs.{rollout.name}.python"
    python = (rollout.engine_kwargs.get(rollout.name) or {}).get("python")
    if python is not None and not Path(str(python)).expanduser().is_file():
        yield Problem(key, python, "there is no such file", "the interpreter of an environment that has the engine", "")
    if python is None and importlib.util.find_spec(rollout.name) is None:
        yield Problem(
            f"{at}rollout.name",
            rollout.name,
            f"the package {rollout.name} is not installed here",
            remedy=f"install it (requirements/{rollout.name}.txt), or name the python of another environment that has "
            f"it in {key}",
        )
    size = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
    per_node = config.trainer.n_gpus_per_node
    if per_node % size:
        yield Problem(
            f"{at}rollout.tensor_model_parallel_size",
            rollout.tensor_model_parallel_size,
            f"so many ranks of one machine share an engine, and it does not divide trainer.n_gpus_per_node={per_node}",
            "a divisor of it",
            f"set {at}rollout.tensor_model_parallel_size=1, where the model fits on one device",
        )
    if rollout.data_parallel_size != 1:
        yield Problem(
            f"{at}rollout.data_parallel_size",
            rollout.data_parallel_size,
            "every rank, or group of tensor-parallel ranks, has an engine of its own already",
            "1",
        )
