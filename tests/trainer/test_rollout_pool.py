"""Runs whose rollout engines have ranks of their own (``hybrid_engine=false``): the bits of runs that share ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from tests.experience.test_ahead import CRITIC, FILTERS
from tests.support.tiny_run import make_tiny_run, overrides, same
from tests.trainer.test_recovery import FragileTrainer, pid_of
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.metric import Metrics

STEPS = 4
OWN_POOL = {
    "trainer__controller": "ray",
    "actor_rollout_ref__hybrid_engine": "false",
    "actor_rollout_ref__rollout__nnodes": 1,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
}
OF_POOL = ("timing", "perf/", "recovery/", "weight_transfer/")
"""Metrics that depend on time, or that only engines with a pool have."""


class PoolTrainer(FragileTrainer):
    """Loses rank 0 of a group, which ``deaths`` names by its attribute; during an update that rank is sampling."""

    trainer_pids: ClassVar[list[int]] = []
    """Of rank 0 of the policy, at the beginning of each step, repeated ones too."""

    def step(self, context: Any) -> Any:
        if self.rollout_workers is not self.policy_workers:
            self.trainer_pids.append(pid_of(self.policy_workers, 0))
        return super().step(context)

    def _send_weights(self, version: int) -> Metrics:
        metrics = super()._send_weights(version)
        self.pid = pid_of(self.rollout_workers, 0)
        if (self.global_steps, "update_actor", "rollout_workers") in self.deaths:
            os.kill(self.pid, signal.SIGSTOP)
        return metrics

    def _harm(self, group: str) -> None:
        pid = self.pid if group == "rollout_workers" else pid_of(self.policy_workers, 0)
        os.kill(pid, signal.SIGKILL)


class PoolRunner(TaskRunner):
    def trainer_class(self) -> type[PPOTrainer]:
        return PoolTrainer


Outcome = tuple[dict[int, dict[str, Any]], dict[str, Any]]
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Run:
    """Train; the metrics of every step and the last checkpoint."""
    root = tmp_path_factory.mktemp("pools")
    paths, reward = make_tiny_run(root), root / "reward.py"
    reward.write_text("def compute_score(solution_str, **others):\n    return len(set(solution_str)) / 8\n")

    def train(name: str, *deaths: tuple[int, str, str], **changes: object) -> Outcome:
        folder, log = root / name, root / f"{name}.jsonl"
        FragileTrainer.deaths = list(deaths)
        PoolTrainer.trainer_pids.clear()
        settings = {
            "trainer__total_training_steps": STEPS,
            "trainer__save_freq": STEPS,
            "trainer__test_freq": 2,
            "trainer__recovery__backoff_s": 0,
            "trainer__recovery__snapshot_freq": 1,
            "actor_rollout_ref__rollout__name": "native",
            "custom_reward_function__path": reward,
        } | changes
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_ppo(compose(overrides(paths, folder, **settings)), PoolRunner)
        assert not FragileTrainer.deaths
        records = [json.loads(line) for line in log.read_text().splitlines()]
        last = folder / "checkpoints" / f"global_step_{STEPS}"
        files = {str(p.relative_to(last)): torch.load(p, weights_only=True) for p in sorted(last.rglob("*.pt"))}
        del files["driver_rng.pt"]  # a rank inside the driver seeds its generators
        return {record["step"]: record["data"] for record in records}, files

    return train


def assert_same_run(pooled: Outcome, shared: Outcome) -> None:
    assert pooled[0].keys() == shared[0].keys()
    for step, expected in shared[0].items():
        got = pooled[0][step]
        names = {name for name in got.keys() | expected.keys() if not name.startswith(OF_POOL)}
        assert [n for n in sorted(names) if not same(got.get(n), expected.get(n))] == [], f"step {step}"
    assert pooled[1].keys() == shared[1].keys()
    for name, state in shared[1].items():
        assert same(pooled[1][name], state), name


def test_engines_with_a_pool_sample_beside_training_what_engines_that_share_ranks_sample(run: Run) -> None:
    """Also where the rollout rank dies while it samples for a later step, the rank that trains dies, and the rollout
    rank dies while it is at rest."""
    shared = run("shared", trainer__async__lag=1)
    of_rollout = (2, "update_actor", "rollout_workers"), (4, "testing", "rollout_workers")
    deaths = [of_rollout[0], (3, "update_actor", "policy_workers"), of_rollout[1]]
    pooled = run("pooled", *deaths, trainer__async__lag=1, **OWN_POOL)
    assert_same_run(pooled, shared)
    # First, step 2 was repeated by the same process, because the next batch needed its initial weights.
    first = PoolTrainer.trainer_pids[0]
    assert [pid == first for pid in PoolTrainer.trainer_pids] == [True] * 4 + [False] * 2  # steps 1 2 2 3, 3 4
    assert [pooled[0][STEPS][f"recovery/{name}"] for name in ("restarts", "rollout_restarts")] == [2, 1]
    assert "timing_s/wait_prev_gen" in pooled[0][3]


REWARD_MODEL = {"reward_model__enable": "true", "reward_model__launch_reward_fn_async": "true"}
ADAPTERS = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__model__target_modules": "all-linear"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="no_lag"),
        pytest.param({"trainer__n_gpus_per_node": 2, "trainer__async__lag": 2}, id="two_ranks_train"),
        pytest.param(
            CRITIC | REWARD_MODEL | {"trainer__async__lag": 1, "trainer__n_gpus_per_node": 2}, id="all_models"
        ),
        pytest.param(FILTERS | {"trainer__async__lag": 1}, id="dynamic_sampling"),
        pytest.param(ADAPTERS | {"trainer__async__lag": 1}, id="adapters"),
        pytest.param({"algorithm__adv_estimator": "remax", "trainer__async__lag": 1}, id="greedy_baseline"),
    ],
)
def test_whatever_a_step_needs(run: Run, changes: dict[str, object], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    shared = {"trainer__controller": "ray"} if "trainer__n_gpus_per_node" in changes else {}
    assert_same_run(run(f"{name} pooled", **changes | OWN_POOL), run(f"{name} shared", **changes | shared))
