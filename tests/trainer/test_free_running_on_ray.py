"""Runs on Ray that do not wait for the slowest response: one pool or two, and processes that die."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.chaos_run import agent_processes
from tests.support.tiny_run import make_tiny_run, overrides
from tests.trainer.test_recovery import pid_of
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.trainer import PPOTrainer

STEPS = 4
COLOCATED = {"trainer__v1__trainer_mode": "colocate_async"}
SEPARATE = {
    "trainer__v1__trainer_mode": "separate_async",
    "trainer__v1__separate_async__parameter_sync_step": 2,  # mini-batches of a step
    "actor_rollout_ref__hybrid_engine": "false",
    "actor_rollout_ref__rollout__nnodes": 1,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
}


class KilledTrainer(PPOTrainer):
    """Kills processes at the end of step 2: rank 0 of ``policy`` or ``rollout``, or the ``router``."""

    kills: ClassVar[list[str]] = []
    trainer_pids: ClassVar[list[int]] = []
    """Of rank 0 of the policy, whenever workers have started, and at the end of each step."""
    agent_pids: ClassVar[list[set[int]]] = []
    """Of the processes of agents, at the end of each step."""

    def start_workers(self) -> None:
        super().start_workers()
        groups = {"policy": self.policy_workers, "rollout": self.rollout_workers}
        # Ranks that serve answer no call.
        self.pids = {name: pid_of(group, 0) for name, group in groups.items()}
        self.trainer_pids.append(self.pids["policy"])

    def report(self, *args: Any) -> None:
        super().report(*args)
        self.trainer_pids.append(pid_of(self.policy_workers, 0))
        self.agent_pids.append({process.pid for process in agent_processes("WorkerActor")})
        if self.global_steps == 2:
            for name in [self.kills.pop() for _ in list(self.kills)]:
                pid = self.pids[name] if name in self.pids else agent_processes("AgentRouter")[0].pid
                os.kill(pid, signal.SIGKILL)


class KilledRunner(TaskRunner):
    def trainer_class(self) -> type[PPOTrainer]:
        return KilledTrainer


Names = dict[int, list[str]]
Run = Callable[..., tuple[Names, dict[int, dict[str, float]]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Run:
    """Train; the names of the samples of each step, and its metrics."""
    root = tmp_path_factory.mktemp("free_on_ray")
    paths = make_tiny_run(root)

    def train(name: str, *kills: str, **changes: object) -> tuple[Names, dict[int, dict[str, float]]]:
        folder = root / name
        log = folder / "log.jsonl"
        KilledTrainer.kills[:] = kills
        KilledTrainer.trainer_pids.clear()
        KilledTrainer.agent_pids.clear()
        settings = {
            "trainer__controller": "ray",
            "trainer__total_training_steps": STEPS,
            "trainer__rollout_data_dir": folder / "samples",
            "trainer__recovery__backoff_s": 0,
            "trainer__recovery__snapshot_freq": 1,
            "actor_rollout_ref__rollout__name": "native",
            # Where weights stay as they are, log-probs over the tokens that sampling kept are those of the rollout.
            "actor_rollout_ref__rollout__top_p": 0.8,
            "actor_rollout_ref__rollout__keep_sampling_mask": "true",
            "actor_rollout_ref__actor__optim__lr": 0,
        } | changes
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_ppo(compose(overrides(paths, folder, **settings)), KilledRunner)
        assert not KilledTrainer.kills
        if changes.items() >= SEPARATE.items():
            check_that_engines_served_beside_the_update(folder / "log.run.jsonl")
        metrics = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
        return {step: samples_of(folder / "samples" / f"{step}.jsonl") for step in range(1, STEPS + 1)}, metrics

    return train


def samples_of(path: Path) -> list[str]:
    rows = map(json.loads, path.read_text().splitlines())
    return [f"{row['uid']}/{row['sample_index']}" for row in rows]


def check_that_engines_served_beside_the_update(path: Path) -> None:
    events = map(json.loads, path.read_text().splitlines())
    spans = {event["step"]: event["spans"] for event in events if event["event"] == "step"}
    [(_, begin, end)] = [span for span in spans[1] if span[0] == "engines"]
    [(_, first, last)] = [span for span in spans[1] if span[0] == "update_actor"]
    assert begin < first < last <= end
    rounds = sorted((begin, end) for of_step in spans.values() for name, begin, end in of_step if name == "engines")
    assert all(end <= begin for (_, end), (begin, _) in pairwise(rounds))


@pytest.mark.slow
@pytest.mark.parametrize("loss_mode", ["forward_kl_topk", "reverse_kl"])
def test_teachers_score_what_other_ranks_sampled(run: Run, tmp_path: Path, loss_mode: str) -> None:
    taught = {
        "distillation__enabled": "true",
        "distillation__teacher_models__teacher_model__model_path": tiny_model_dir(tmp_path, family="qwen3", seed=7),
        "distillation__distillation_loss__loss_mode": loss_mode,
        "distillation__distillation_loss__use_task_rewards": "false",
        # Over the whole vocabulary, and with weights that change.
        "actor_rollout_ref__rollout__top_p": 1,
        "actor_rollout_ref__rollout__keep_sampling_mask": "false",
        "actor_rollout_ref__actor__optim__lr": 3e-3,
    }
    _, metrics = run(loss_mode, **SEPARATE, **taught)
    assert metrics[STEPS]["distillation/loss"] < metrics[1]["distillation/loss"]


ALL = sorted(f"{step}-{row}/{index}" for step in range(1, STEPS + 1) for row in range(4) for index in range(4))


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        pytest.param(SEPARATE, ["rollout"], id="rollout_rank"),
        pytest.param(SEPARATE, ["router"], id="router", marks=pytest.mark.slow),
        pytest.param(SEPARATE, ["policy"], id="trainer_rank", marks=pytest.mark.slow),
        pytest.param(COLOCATED, ["policy"], id="one_pool", marks=pytest.mark.slow),
    ],
)
def test_every_sample_is_trained_on_once_though_a_process_dies(
    run: Run, mode: dict[str, object], kills: list[str], request: pytest.FixtureRequest
) -> None:
    names, metrics = run(request.node.callspec.id, *kills, **mode)
    assert sorted(name for step in names.values() for name in step) == ALL
    for step in (metrics[number] for number in range(1, STEPS + 1)):
        assert step["training/sampling_mask/unknown"] == 0
        assert step["training/rollout_probs_diff_max"] < 1e-5
    if "policy" in kills:
        assert metrics[STEPS]["recovery/restarts"] == 1
    else:  # the trainer has gone on, in the same process, without going back to an earlier state
        assert len(set(KilledTrainer.trainer_pids)) == 1
        assert "recovery/restarts" not in metrics[STEPS]
        assert metrics[STEPS]["recovery/rollout_restarts"] == 1
        assert (KilledTrainer.agent_pids[0] == KilledTrainer.agent_pids[-1]) is ("router" not in kills)
    if mode is SEPARATE:
        assert 0 <= metrics[STEPS]["fully_async/trainer/idle_ratio"] <= 1
        assert 0 <= metrics[STEPS]["fully_async/rollouter/idle_ratio"] <= 1
    assert max(of_step["training/off_policy/trajectory_staleness_worst/max"] for of_step in metrics.values()) <= 8
