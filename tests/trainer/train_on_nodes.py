"""One training on a cluster of three nodes on this machine, of which one may die in its second step; metrics as JSON.

A program of its own, because the tests' process has its Ray already::

    python -m tests.trainer.train_on_nodes FOLDER {ulysses|megatron|vllm} [lose]

Two nodes have two ranks each, and the third is spare. The four ranks are one model: under FSDP they share sequences in
pairs, under Megatron matrices and layers. With vllm each node has one rank, and both share a vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster

from tests.support.tiny_run import make_tiny_run, overrides
from tests.support.waiting import eventually
from verl.protocol import tensor_columns
from verl.testing.models import tiny_model_dir
from verl.trainer.config import PPOConfig, load_config
from verl.trainer.config.command_line import compose
from verl.trainer.config.overrides import keys_set
from verl.trainer.main_ppo import run_ppo

SYSTEM = {
    # A dead node is noticed after a second, instead of a quarter of a minute.
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3,
}  # fmt: skip
CPUS = 2
NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}
SHARED = {
    "ulysses": {"actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2},
    "megatron": {
        "actor_rollout_ref__actor__strategy": "megatron",
        "actor_rollout_ref__actor__megatron__tensor_model_parallel_size": 2,
        "actor_rollout_ref__actor__megatron__pipeline_model_parallel_size": 2,
        "actor_rollout_ref__actor__megatron__dtype": "float32",
    },
    "vllm": {
        "trainer__n_gpus_per_node": 1,
        "actor_rollout_ref__rollout__name": "vllm",
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
        "actor_rollout_ref__rollout__enforce_eager": True,
        "actor_rollout_ref__rollout__engine_kwargs__vllm__kv_cache_memory_bytes": 64 << 20,
    },
}
REWARD = "def compute_score(solution_str, **_):\n    return sum(c.isdigit() for c in solution_str) / 8\n"


def kill_a_node_with_ranks(cluster: Cluster, log: Path) -> None:
    """End a node that has ranks as soon as the first step is over."""
    eventually(lambda: log.exists() and log.read_text().count("\n") >= 1, "the first step", within_s=400)
    free = available_resources_per_node()
    busy = [node for node in cluster.worker_nodes if free[node.node_id].get("CPU", 0.0) < CPUS]
    assert len(busy) == 2
    cluster.remove_node(busy[-1], allow_graceful=False)


def main(folder: Path, shared: str, lose: bool) -> list[dict[str, Any]]:
    """Train three steps; return the logged metrics."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "_system_config": SYSTEM})
    for _ in range(3):
        cluster.add_node(num_cpus=CPUS, **NODE)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    log = folder / "metrics.jsonl"
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    (folder / "reward.py").write_text(REWARD)
    tensor_columns.MIN_BYTES = 1  # all columns travel as references, between nodes too
    settings = {
        "actor_rollout_ref__actor__use_kl_loss": "true",
        "actor_rollout_ref__actor__optim__lr": 1e-4,
        "custom_reward_function__path": folder / "reward.py",
        "trainer__controller": "ray",
        "trainer__nnodes": 2,
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": 3,
        **SHARED[shared],
    }
    if lose:
        threading.Thread(target=kill_a_node_with_ranks, args=(cluster, log), daemon=True).start()
    paths = make_tiny_run(folder)
    if shared == "vllm":  # whose kernels for a CPU have no smaller heads
        paths |= {"model": tiny_model_dir(folder / "heads_of_32", head_dim=32)}
    words = overrides(paths, folder, **settings)
    run_ppo(load_config(compose(words), PPOConfig, keys_set(words)))
    ray.shutdown()
    cluster.shutdown()
    return [json.loads(line) for line in log.read_text().splitlines()]


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(main(Path(sys.argv[1]), sys.argv[2], 'lose' in sys.argv))}\n")
