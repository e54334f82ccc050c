"""Whole runs in miniature, through the entry point that users call."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides
from verl.errors import CheckpointError
from verl.experience.lockstep import Lockstep
from verl.experience.source import Experience
from verl.plugins.view.discovery import find_runs
from verl.plugins.view.ranks import RanksFile, lanes_of, waits_of
from verl.plugins.view.timeline import spans_of
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.step_context import StepContext

CLOCKS = ("timing", "perf/", "global_seqlen/")


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run with changed settings; the metrics of every step."""
    paths = make_tiny_run(tmp_path)
    # A random policy never solves countdown: a reward that it can earn makes gradients, so numbers can differ.
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(**changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {"custom_reward_function__path": str(tmp_path / "reward.py")} | changes
        run_ppo(compose(overrides(paths, tmp_path, **settings)))
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return {record["step"]: record["data"] for record in records}

    return run


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith(CLOCKS)}


def rounding(key: str) -> float:
    """How far apart a number that is nearly 0 may lie when sums are taken in another order."""
    if key == "rollout_corr/chi2_seq":
        return 1e-5  # exp of twice the sum of all gaps of a response: 2 * 16 tokens * 3e-7, as below
    if key.startswith(("training/rollout_", "rollout_corr/")):
        return 5e-6  # the gap between rollout and trainer is rounding itself: small on both sides is all that holds
    if key.endswith(("loss", "_kl", "loss_min", "loss_max")):
        # Means of terms of order 1 that nearly cancel. Each has the error of log-prob - old log-prob, two numbers of
        # size 5, each rounded by 5 / 2^24 = 3e-7.
        return 6e-7
    if key.endswith("explained_var"):
        return 2.4e-7  # 1 minus a ratio near 1, which is rounded by 2^-23
    return 1e-7


def assert_same_steps(a: dict[int, dict[str, float]], b: dict[int, dict[str, float]], rel: float) -> None:
    assert a.keys() == b.keys()
    for step in a:
        left, right = comparable(a[step]), comparable(b[step])
        assert left.keys() == right.keys()
        for key in left:
            assert right[key] == pytest.approx(left[key], rel=rel, abs=rounding(key) if rel else 0, nan_ok=True), (
                step,
                key,
            )


def assert_ranks_are_recorded(log: Path, ranks: list[str], stage_of: dict[str, str]) -> None:
    """Of steps 1 and 2 each rank has its calls, within the stages that made them, and its memory."""
    file = RanksFile(log.with_suffix(".ranks.jsonl"))
    events = [json.loads(line) for line in log.with_suffix(".run.jsonl").read_text().splitlines()]
    assert file.steps(None, None) == [1, 2]
    for step in spans_of(events, None, None):
        stages = {span["name"]: span for span in step["spans"]}
        begin, seconds = stages["step"]["begin"], stages["step"]["seconds"]
        lanes = lanes_of(file.calls(step["step"]), begin, begin + seconds)
        assert [lane["rank"] for lane in lanes] == ranks
        for lane in lanes:
            calls = {call["name"].split(".")[1]: call for call in lane["calls"]}
            for method, stage in stage_of.items():
                call, around = calls[method], stages[stage]
                assert around["begin"] - 0.005 <= call["begin"]
                assert call["begin"] + call["seconds"] <= around["begin"] + around["seconds"] + 0.005
                assert call["rss_mb"] > 100
            assert 0 < sum(waits_of(lane["calls"], step["spans"]).values()) < seconds


def test_grpo_learns_from_a_reward_that_it_can_earn(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = train(
        trainer__total_training_steps=12,
        trainer__test_freq=12,
        trainer__val_before_train="true",
        trainer__rollout_data_dir="rollouts",
        actor_rollout_ref__actor__optim__lr=1e-2,
        actor_rollout_ref__rollout__n=8,
    )
    assert list(steps) == list(range(13))
    first = sum(steps[s]["critic/score/mean"] for s in (1, 2)) / 2
    last = sum(steps[s]["critic/score/mean"] for s in (11, 12)) / 2
    assert last > first + 0.1
    assert "val-core/countdown/reward/mean@1" in steps[0]
    assert "val-core/countdown/reward/mean@1" in steps[12]
    assert steps[1]["training/rollout_probs_diff_max"] < 1e-5
    records = [json.loads(line) for line in (tmp_path / "rollouts" / "3.jsonl").read_text().splitlines()]
    assert len(records) == 4 * 8
    assert {"input", "output", "gts", "score", "step"} <= records[0].keys()
    assert sum(r["score"] for r in records) / 32 == pytest.approx(steps[3]["critic/score/mean"])
    monkeypatch.chdir("/")  # the view starts anywhere
    (run,) = find_runs([tmp_path]).runs
    assert {record["run"] for record in records} == run.writers
    assert [one.path for one in run.named] == [tmp_path.resolve() / "rollouts"]


@pytest.mark.parametrize(
    ("estimator", "changes"),
    [
        ("gae", {"algorithm__use_kl_in_reward": "true", "reward_model__enable": "true", "trainer__critic_warmup": 1}),
        ("rloo", {"actor_rollout_ref__actor__use_kl_loss": "true", "actor_rollout_ref__actor__entropy_coeff": 0.01}),
    ],
)
def test_every_estimator_runs_with_what_it_needs(train, estimator, changes):
    steps = train(algorithm__adv_estimator=estimator, **changes)
    assert list(steps) == [1, 2]
    assert ("critic/vf_loss" in steps[2]) == (estimator == "gae")
    assert ("actor/kl_loss" in steps[2]) == (estimator == "rloo")
    assert ("actor/reward_kl_penalty" in steps[2]) == (estimator == "gae")
    # The first step of gae only warms the critic up.
    assert ("actor/pg_loss" in steps[1]) == (estimator != "gae")
    assert steps[2]["actor/grad_norm"] > 0


class WatchedSource(Lockstep):
    """Keeps each step with the version of the weights that it samples with; checkpoints hold both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.load_state_dict({"version": 0, "steps": []})

    def next(self, context: StepContext) -> Experience:
        self.steps.append([context.number, self.version])
        return super().next(context)

    def updated(self, version: int) -> None:
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version, self.steps = state["version"], state["steps"]


def test_a_resumed_run_continues_where_it_stopped(train, tmp_path, monkeypatch):
    # 16 prompts in batches of 4 make an epoch of 4 steps: the break after step 4 is at its end; test_killed_runs and
    # test_dynamic_sampling break off within one.
    common = {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": "true"}
    straight = train(trainer__total_training_steps=5, trainer__default_local_dir=tmp_path / "straight", **common)
    folder = tmp_path / "stopped"
    monkeypatch.setattr(PPOTrainer, "experience_class", WatchedSource)
    train(trainer__total_training_steps=4, trainer__save_freq=4, trainer__default_local_dir=folder, **common)
    rest = train(trainer__total_training_steps=5, trainer__save_freq=5, trainer__default_local_dir=folder, **common)
    assert_same_steps({5: straight[5]}, rest, rel=0)
    state = json.loads((folder / "global_step_5" / "trainer_state.json").read_text())
    assert state["experience"] == {"version": 5, "steps": [[1, 0], [2, 1], [3, 2], [4, 3], [5, 4]]}


def test_a_changed_setting_holds_after_a_resume_and_is_shown(train, caplog):
    train(trainer__total_training_steps=1, trainer__save_freq=0)  # at the end
    assert "other settings" not in caplog.text
    steps = train(
        trainer__total_training_steps=2, trainer__save_freq=0, actor_rollout_ref__actor__optim__lr=1e-4,
        actor_rollout_ref__actor__clip_ratio_high=0.3,
    )  # fmt: skip
    assert {step: metrics["actor/lr"] for step, metrics in steps.items()} == {2: 1e-4}
    (shown,) = [record.getMessage() for record in caplog.records if "other settings" in record.getMessage()]
    assert "\n  actor_rollout_ref.actor.optim.lr: 0.001 in the checkpoint, 0.0001 now" in shown
    assert "\n  actor_rollout_ref.actor.clip_ratio_high: 0.2 in the checkpoint, 0.3 now" in shown
    assert "\n  trainer.total_training_steps: 1 in the checkpoint, 2 now" in shown


def test_a_run_that_saves_nothing_says_so(train, tmp_path, caplog):
    train(trainer__total_training_steps=1)
    told = [record.getMessage() for record in caplog.records if "save_freq=-1" in record.getMessage()]
    assert [text.split(":")[0] for text in told] == [
        "trainer.save_freq=-1",
        "The run is over, and no model was saved (trainer.save_freq=-1).",
    ]
    assert not list((tmp_path / "checkpoints").glob("global_step_*"))


def test_old_checkpoints_go_and_the_latest_is_named(train, tmp_path):
    train(trainer__total_training_steps=3, trainer__save_freq=1, trainer__max_actor_ckpt_to_keep=2)
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (root / "global_step_3" / "actor" / "model_world_size_1_rank_0.pt").exists()


def test_a_damaged_checkpoint_stops_the_run(train, tmp_path):
    train(trainer__total_training_steps=1, trainer__save_freq=1)
    model = tmp_path / "checkpoints" / "global_step_1" / "actor" / "model_world_size_1_rank_0.pt"
    model.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"model_world_size_1_rank_0\.pt"):
        train(trainer__total_training_steps=2)


def test_a_save_that_fails_is_made_up_for_and_the_last_one_must_succeed(train, tmp_path, monkeypatch):
    failing = {"global_step_2.partial"}
    make = os.mkdir

    def full_disk(path, *args, **kwargs):
        if Path(path).name in failing:
            raise OSError(28, "No space left on device", str(path))
        make(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", full_disk)
    steps = train(trainer__total_training_steps=4, trainer__save_freq=2)
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.glob("global_step_*")) == ["global_step_3", "global_step_4"]
    assert [step.get("recovery/failed_saves") for step in steps.values()] == [None, 1.0, 1.0, 1.0]
    failing.add("global_step_5.partial")
    with pytest.raises(CheckpointError, match=r"last checkpoint could not be written .*global_step_4"):
        train(trainer__total_training_steps=5, trainer__save_freq=2)
    failing.clear()
    assert list(train(trainer__total_training_steps=5, trainer__save_freq=2)) == [5]


def test_a_failing_sample_leaves_training_and_is_counted(train, tmp_path):
    (tmp_path / "flaky.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['index'] % 4 == 1:\n"
        "        raise KeyError('no such test case')\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    steps = train(
        custom_reward_function__path=tmp_path / "flaky.py", reward_model__max_error_rate=0.5, data__shuffle="false"
    )
    assert steps[1]["reward/error_rate"] == 0.25
    assert steps[1]["actor/grad_norm"] > 0


def test_a_prompt_whose_greedy_response_has_no_score_is_left_out(train, tmp_path):
    (tmp_path / "flaky.py").write_text(
        "from pathlib import Path\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    seen = Path(__file__).with_suffix('.seen')\n"
        "    first = not seen.exists()\n"  # the very first call is of a greedy response
        "    seen.touch()\n"
        "    if first:\n"
        "        raise KeyError('no such test case')\n"
        "    return 100 * extra_info['index'] + sum(c.isdigit() for c in solution_str) / 8\n"
    )
    steps = train(
        algorithm__adv_estimator="remax",
        actor_rollout_ref__rollout__n=2,
        custom_reward_function__path=tmp_path / "flaky.py",
        reward_model__max_error_rate=0.5,
        trainer__total_training_steps=1,
    )
    assert steps[1]["reward/baseline_error_rate"] == 0.25
    assert steps[1]["reward/error_rate"] == 0  # its samples were scored; there is nothing to compare them with
    assert steps[1]["actor/grad_norm"] > 0
    # Each sample is compared with the greedy response to its own prompt: rewards of others differ by 100.
    assert -16 < steps[1]["critic/advantages/min"] < steps[1]["critic/advantages/max"] < 16


def test_ray_with_two_ranks_gives_the_numbers_of_one_local_rank(train, ray_cluster, monkeypatch, tmp_path):
    monkeypatch.setattr("verl.protocol.tensor_columns.MIN_BYTES", 1)  # columns travel as references, as large ones do
    common = {"actor_rollout_ref__actor__use_kl_loss": "true", "trainer__total_training_steps": 2}
    local = train(**common)
    ray = train(trainer__controller="ray", trainer__n_gpus_per_node=2, **common)
    assert_same_steps(local, ray, rel=1e-5)
    assert torch.isfinite(torch.tensor(local[2]["actor/grad_norm"]))
    stage_of = {"generate_sequences": "gen", "compute_ref_log_prob": "ref", "update_actor": "update_actor"}
    assert_ranks_are_recorded(tmp_path / "metrics.jsonl", ["global_pool 0", "global_pool 1"], stage_of)


SHARED_SEQUENCES = {
    "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2,  # the reference follows
    "critic__ulysses_sequence_parallel_size": 2,
    "reward_model__ulysses_sequence_parallel_size": 2,
}
ALL_MODELS = {
    "algorithm__adv_estimator": "gae",
    "actor_rollout_ref__actor__use_kl_loss": "true",
    "reward_model__enable": "true",
    "actor_rollout_ref__actor__entropy_coeff": 0.01,
}


@pytest.mark.slow
def test_ranks_that_share_sequences_give_the_numbers_of_one(train, ray_cluster):
    local = train(**ALL_MODELS)
    shared = train(trainer__controller="ray", trainer__n_gpus_per_node=2, **ALL_MODELS, **SHARED_SEQUENCES)
    assert_same_steps(local, shared, rel=1e-5)
    assert local[2]["critic/vf_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [ALL_MODELS, {"algorithm__adv_estimator": "grpo"}], ids=["gae", "grpo"])
@pytest.mark.parametrize("packed", ["true", "false"])
def test_four_ranks_in_two_groups_give_the_numbers_of_one(train, ray_cluster, settings, packed):
    common = settings | {
        "trainer__total_training_steps": 3,
        "actor_rollout_ref__model__use_remove_padding": packed,
        "critic__model__use_remove_padding": packed,
        "actor_rollout_ref__actor__optim__lr": 1e-4,  # larger steps amplify rounding
        "critic__optim__lr": 1e-4,
    }
    local = train(**common)
    ray = train(trainer__controller="ray", trainer__n_gpus_per_node=4, **common, **SHARED_SEQUENCES)
    assert_same_steps(local, ray, rel=1e-5)


@pytest.mark.slow
def test_ranks_that_divide_matrices_give_the_numbers_of_one(train, ray_cluster):
    sections = ("actor_rollout_ref__actor", "actor_rollout_ref__ref", "critic__model", "reward_model__model")
    divided = {f"{section}__fsdp_config__tensor_parallel_size": 2 for section in sections}
    local = train(**ALL_MODELS)
    shared = train(trainer__controller="ray", trainer__n_gpus_per_node=2, **ALL_MODELS, **divided)
    assert_same_steps(local, shared, rel=1e-5)
    assert local[2]["critic/vf_loss"] > 0


HYBRID = {
    f"{section}__fsdp_config__fsdp_size": 2
    for section in ("actor_rollout_ref__actor", "actor_rollout_ref__ref", "critic__model")
}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [{}, SHARED_SEQUENCES], ids=["hybrid", "hybrid and Ulysses"])
def test_two_copies_over_two_ranks_each_give_the_numbers_of_one(train, ray_cluster, shared):
    common = {
        "algorithm__adv_estimator": "grpo",
        "actor_rollout_ref__actor__use_kl_loss": "true",
        "trainer__total_training_steps": 3,
        "actor_rollout_ref__actor__optim__lr": 1e-4,
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2,
    }
    local = train(**common)
    ray = train(trainer__controller="ray", trainer__n_gpus_per_node=4, **common, **HYBRID, **shared)
    assert_same_steps(local, ray, rel=1e-5)
