"""Defaults that follow the machine: ranks per node, and the number format."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.config.support import Run
from verl.base.ray_address import cluster_address
from verl.config.machine import assumed_gpus, gpus_among
from verl.trainer.config import PPOConfig, SFTConfig, load_config
from verl.trainer.config.command_line import compose
from verl.trainer.config.sizes import resolve_device

ACTOR = "actor_rollout_ref.actor"


def loaded(*overrides: str, name: str = "ppo_trainer", root: type = PPOConfig):
    return load_config(compose(overrides, name), root, with_rules=False, with_algorithms=False)


@pytest.mark.parametrize(
    ("gpus", "settings", "ranks", "dtype"),
    [
        (0, (), 1, "float32"),
        (4, (), 4, "bfloat16"),
        (4, ("trainer.nnodes=2",), 8, "bfloat16"),
        (4, ("trainer.device=cpu",), 1, "float32"),
        (4, ("trainer.controller=local",), 1, "bfloat16"),
        (4, ("trainer.n_gpus_per_node=3",), 3, "bfloat16"),
        (0, ("trainer.n_gpus_per_node=3",), 3, "float32"),
        (0, (f"{ACTOR}.fsdp_config.dtype=bfloat16",), 1, "bfloat16"),
        (4, (f"{ACTOR}.fsdp_config.dtype=float32",), 4, "float32"),
    ],
)
def test_ranks_and_format_follow_the_gpus_unless_they_are_set(gpus, settings, ranks, dtype, monkeypatch):
    monkeypatch.setattr("verl.config.machine.local_gpus", lambda: gpus)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # tests before may have left one running
    config = loaded(*settings)
    assert (config.trainer.ranks, config.actor_rollout_ref.actor.fsdp_config.dtype) == (ranks, dtype)
    others = config.critic.model.fsdp_config, config.actor_rollout_ref.rollout, config.reward_model.rollout
    assert config.actor_rollout_ref.actor.fsdp_config.model_dtype == "fp32"  # trained in fp32, whatever computes
    reference = config.actor_rollout_ref.ref.fsdp_config
    assert (
        reference.model_dtype
        == reference.dtype
        == ("bfloat16" if gpus and "trainer.device=cpu" not in settings else "float32")
    )
    if not settings:
        assert {section.dtype for section in others} == {config.actor_rollout_ref.actor.megatron.dtype} == {dtype}
    assert resolve_device(config) == ("cuda" if gpus and "trainer.device=cpu" not in settings else "cpu")


def test_each_node_has_as_many_ranks_as_the_smallest_node_in_use_has_gpus(monkeypatch):
    monkeypatch.setattr("verl.config.machine.gpus_of_nodes", lambda *_: (4, 3, 1))
    found = [loaded(f"trainer.nnodes={nodes}").trainer.n_gpus_per_node for nodes in (1, 2, 3)]
    assert found == [4, 3, 1]


def test_scripts_may_refer_to_the_default():
    settings = ["data.train_batch_size=${trainer.n_gpus_per_node}", "reward_model.enable_resource_pool=true"]
    with assumed_gpus(6):
        composed = compose(settings)
        assert (composed.data.train_batch_size, composed.trainer.n_gpus_per_node) == (6, 6)
        assert loaded(*settings).reward_model.n_gpus_per_node == 6


def test_supervised_runs_take_what_torchrun_started_first(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)  # engines of other tests in this process set it
    with assumed_gpus(4):
        assert loaded(name="sft_trainer", root=SFTConfig).trainer.ranks == 4
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert loaded(name="sft_trainer", root=SFTConfig).trainer.ranks == 2


def test_gpus_of_live_nodes_the_most_first():
    nodes = [(True, {"CPU": 8.0}), (True, {"GPU": 2.0}), (False, {"GPU": 8.0}), (True, {"CPU": 1.0, "GPU": 4.0})]
    assert gpus_among([{"Alive": alive, "Resources": resources} for alive, resources in nodes]) == (4, 2)


def test_which_cluster_a_run_connects_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert cluster_address({}) == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("10.0.0.1:6379")  # as `ray start` does
    assert cluster_address({"num_cpus": None}) == "10.0.0.1:6379"
    assert cluster_address({"num_cpus": 4}) == "", "arguments that start one"
    assert cluster_address({"address": "local"}) == ""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert cluster_address({}) == cluster_address({"address": "auto"}) == "10.0.0.2:6379"
    assert cluster_address({"address": "10.0.0.3:6379"}) == "10.0.0.3:6379"


ON_A_CLUSTER = """
import json, os
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
for gpus in (3, 2):
    cluster.add_node(num_cpus=1, num_gpus=gpus)
os.environ["RAY_ADDRESS"] = cluster.address
from verl.trainer.config import load_config
from verl.trainer.config.command_line import compose
from verl.trainer.config.sizes import resolve_device

found = []
for nodes in (1, 2):
    config = load_config(compose([f"trainer.nnodes={nodes}"]), with_rules=False)
    found.append([config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.dtype, resolve_device(config)])
print(json.dumps(found))
"""


@pytest.mark.slow  # three nodes of Ray
def test_a_driver_without_gpus_trains_on_those_of_the_cluster():
    """The head has none, the other nodes three and two: one node has three ranks, two nodes have two each."""
    done = subprocess.run([sys.executable, "-c", ON_A_CLUSTER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[3, "bfloat16", "cuda"], [2, "bfloat16", "cuda"]]


def test_a_checked_run_has_the_defaults(run: Run):
    del run.ppo["trainer.n_gpus_per_node"], run.ppo["trainer.logger"]
    config = run.load()
    assert (config.trainer.ranks, config.trainer.logger) == (1, ("console", "file"))
