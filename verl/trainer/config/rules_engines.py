"""Rules about rollout engines: the ranks that share one, and engines that are slow on the device of the run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from verl.config import GenerationConfig, PPOConfig, Problem, RolloutConfig
from verl.config.rollout import OTHER_PROGRAMS, OWN_ENGINES
from verl.trainer.config.sizes import resolve_device

PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
)
"""Settings of a rollout engine that several ranks share."""


def parallel_sizes(config: PPOConfig | GenerationConfig) -> Iterator[Problem]:
    """The ranks that share an engine are on one machine, and only engines that can be shared have several."""
    for path, rollout, ranks_key, ranks_per_node in _engines(config):
        if rollout.name in OTHER_PROGRAMS:
            yield from _of_one_machine(path, rollout, ranks_key, ranks_per_node)
        elif rollout.name in OWN_ENGINES:
            yield from _of_one_rank(path, rollout)


def speed(config: PPOConfig | GenerationConfig) -> Iterator[Problem]:
    """Advise against an engine without CUDA graphs on a GPU."""
    device = resolve_device(config)
    for path, rollout, _, _ in _engines(config):
        yield from without_graphs(path, rollout.name, device)


def without_graphs(path: str, name: str, device: str) -> Iterator[Problem]:
    """Advise against engine ``name`` of the section ``path`` if the device is a GPU and it has no CUDA graphs."""
    if device == "cuda" and name in OWN_ENGINES:
        wrong = "it has no CUDA graphs: each operation of each token is started from Python, and the GPU waits for it"
        where = "which is installed here" if importlib.util.find_spec("vllm") else "in an environment of its own too"
        remedy = f"set {path}.name=vllm ({where}), unless this engine is what you want"
        yield Problem(f"{path}.name", name, wrong, "vllm, sglang", remedy, advice=True)


def _engines(config: PPOConfig | GenerationConfig) -> Iterator[tuple[str, RolloutConfig, str, int]]:
    """Yield path and settings of each engine, and key and number of the ranks of one of its machines."""
    of_trainer = "trainer.n_gpus_per_node", config.trainer.n_gpus_per_node
    if isinstance(config, GenerationConfig):
        yield "rollout", config.rollout, *of_trainer
        return
    yield "actor_rollout_ref.rollout", config.actor_rollout_ref.rollout, *of_trainer
    if config.judge is not None:
        own = "reward_model.n_gpus_per_node", config.reward_model.n_gpus_per_node
        key, number = own if config.reward_model.enable_resource_pool else of_trainer
        yield "reward_model.rollout", config.judge.rollout, key, number


def _of_one_machine(path: str, rollout: RolloutConfig, ranks_key: str, ranks_per_node: int) -> Iterator[Problem]:
    size = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
    if ranks_per_node % size:
        key = f"{path}.tensor_model_parallel_size"
        wrong = f"so many ranks of one machine share an engine, and it does not divide {ranks_key}={ranks_per_node}"
        remedy = f"set {key}=1, where the model fits on one device"
        yield Problem(key, rollout.tensor_model_parallel_size, wrong, "a divisor of it", remedy)


def _of_one_rank(path: str, rollout: RolloutConfig) -> Iterator[Problem]:
    for name in PARALLEL_SIZES:
        if rollout[name] != 1:
            wrong = f"with {path}.name={rollout.name} each rank generates with a whole copy of the model"
            remedy = f"leave it out; to split a model over ranks, set {path}.name=vllm or sglang"
            yield Problem(f"{path}.{name}", rollout[name], wrong, "1", remedy)
