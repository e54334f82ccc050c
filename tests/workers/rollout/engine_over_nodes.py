"""One engine whose two ranks are on two nodes of a Ray cluster on this machine; what it answered, as JSON.

A program of its own, because the tests' process has its Ray already::

    python -m tests.workers.rollout.engine_over_nodes {vllm|sglang} FAMILY PYTHON FOLDER [SETTING=NUMBER...]

FAMILY is that of the tiny model. PYTHON is the interpreter that has the engine; this one has Ray. The engine answers
with weights of seed 0 and of seed 1, and again after a process of it was killed on each node.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Literal

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

from tests.workers.rollout.losses import struck
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup, ResourcePoolManager
from verl.testing.models import tiny_model_dir
from verl.testing.rollout_conformance import PROMPTS, prompt_batch, shape_of, weights_of
from verl.utils import hf_tokenizer
from verl.utils.device import ensure_process_group
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.remote import RemoteRollout

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
KWARGS = {"vllm": {"kv_cache_memory_bytes": 64 << 20}, "sglang": {}}
WORKERS = {"vllm": "VLLM::Worker", "sglang": "sglang::scheduler"}
"""Title of the processes that compute."""


class Served(Worker):
    """A rank of the engine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build(self, name: Literal["vllm", "sglang"], python: str, path: str, sizes: dict[str, int]) -> None:
        ensure_process_group(torch.device("cpu"), 600)
        lengths = {"prompt_length": 8, "response_length": 200}
        options = {
            "dtype": "float32",
            "ignore_eos": True,
            "enforce_eager": True,
            "engine_kwargs": {name: {"python": python, **KWARGS[name]}},
        }
        config = RolloutConfig(name=name, **lengths, **options, **sizes)
        model = HFModelConfig(path=path)
        rollout = get_rollout_class(name)(config, model, hf_tokenizer(path), torch.device("cpu"))
        assert isinstance(rollout, RemoteRollout)
        self.name, self.rollout = name, rollout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def answer(self, family: str, seed: int, victim: int | None = None) -> tuple[list[list[int]], list[list[float]]]:
        """Answer greedily; on rank ``victim`` a process of the engine is killed meanwhile."""
        batch = prompt_batch(PROMPTS, do_sample=False)
        with self.rollout.awake(lambda: weights_of(family, seed), seed), ExitStack() as entered:
            if self.rank == victim:
                processes = set(psutil.Process().children(recursive=True))
                entered.enter_context(struck(WORKERS[self.name], processes))
            answers = self.rollout.generate_sequences(batch if self.rollout.leads else DataProto())
        if not self.rollout.leads:
            return [], []
        return answers.batch["responses"].tolist(), answers.batch["rollout_log_probs"].tolist()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> tuple[int, list[str]]:
        """Return how often the engine was restarted, and the titles of the processes on this node."""
        names = [process.name() for process in psutil.Process().children(recursive=True)]
        return self.rollout.restarts, sorted(names)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end(self) -> None:
        """End the engine's processes."""
        self.rollout._end_engine()


def main(name: str, family: str, python: str, folder: str, sizes: dict[str, int]) -> dict[str, object]:
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=True, configure_logging=False)
    pools = ResourcePoolManager({"global": [1, 1]}, {"actor": "global"}, "cpu")
    pools.create_resource_pool()
    pool = pools.get_resource_pool("actor")
    assert isinstance(pool, RayResourcePool)
    group = RayWorkerGroup(pool, RayWorkerGroup.describe(Served), device_name="cpu")
    group.build(name, python, tiny_model_dir(folder, family, **shape_of(family)), sizes)
    seen: dict[str, object] = {"undisturbed": [group.answer(family, 0)[0], group.answer(family, 1)[0]]}
    seen["processes"] = [names for _, names in group.state()]
    seen["disturbed"] = [group.answer(family, 1, victim)[0] for victim in (0, 1)]
    seen["restarts"] = group.state()[0][0]
    group.end()
    group.shutdown()
    pools.release()
    ray.shutdown()
    cluster.shutdown()
    return seen


if __name__ == "__main__":
    given = {key: int(number) for key, number in (argument.split("=") for argument in sys.argv[5:])}
    sys.stdout.write(f"\n{json.dumps(main(*sys.argv[1:5], given))}\n")
