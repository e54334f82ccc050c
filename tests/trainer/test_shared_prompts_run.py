"""Whole runs with shared prompts end as those without them: all metrics, and the weights of the last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.support.tiny_run import make_tiny_run, overrides
from tests.trainer.test_recovery import FragileRunner, FragileTrainer
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo

STEPS = 2
ACTOR, ROLLOUT = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
NOT_COMPARED = ("timing", "perf/", "recovery/", "global_seqlen/", "train/time", "train/mfu", "train/cpu_memory")
TOKENS = {f"{ACTOR}use_dynamic_bsz": True, f"{ACTOR}ppo_max_token_len_per_gpu": 70}
TOKENS |= {f"{ROLLOUT}log_prob_use_dynamic_bsz": True, f"{ROLLOUT}log_prob_max_token_len_per_gpu": 70}
GAE = {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True}
FILTER = {"enable": True, "metric": "acc", "max_num_gen_batches": 0}
CASES: dict[str, dict[str, Any]] = {
    "rows": {},
    "tokens, two epochs, shuffled": TOKENS | {f"{ACTOR}ppo_epochs": 2, f"{ACTOR}shuffle": True},
    "dynamic sampling": TOKENS | {f"algorithm__filter_groups__{key}": value for key, value in FILTER.items()},
    "sequences, adapters": TOKENS
    | {f"{ACTOR}policy_loss__loss_mode": "gspo", "actor_rollout_ref__model__lora_rank": 4},
    "critic": TOKENS | GAE | {"critic__model__use_remove_padding": True},
    "own forward": {f"{ACTOR}ppo_mini_batch_size": 4},
    "nothing shared": TOKENS | {f"{ROLLOUT}n": 1, "algorithm__adv_estimator": "reinforce_plus_plus"},
}
FIRST = ("tokens, two epochs, shuffled",)
RANKS = TOKENS | {"trainer__controller": "ray", "trainer__n_gpus_per_node": 2, "trainer__recovery__backoff_s": 0}


class Runs:
    """Runs of one model on the same data, with and without shared prompts of actor and critic."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.paths, self._monkeypatch = folder, make_tiny_run(folder), monkeypatch
        # A random policy never solves countdown: a reward that it can earn makes gradients.
        (folder / "reward.py").write_text(
            "def compute_score(solution_str, **_):\n"
            "    digits = sum(c.isdigit() for c in solution_str)\n"
            "    return {'score': digits / 8, 'acc': float(digits > 1)}\n"
        )

    def train(
        self, name: str, shares: bool, changes: dict[str, Any], runner: type[TaskRunner] | None = None
    ) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        """The metrics of each step, and the weights of actor and critic after the last."""
        log = self.folder / f"{name}.jsonl"
        self._monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        settings = {
            f"{ACTOR}use_prefix_grouper": shares,
            "critic__use_prefix_grouper": shares and changes.get("algorithm__adv_estimator") == "gae",
            f"{ACTOR}use_kl_loss": True,
            f"{ACTOR}entropy_coeff": 0.01,
            # Adam's steps are as large as the rate also where a gradient is only rounding.
            f"{ACTOR}optim__lr": 1e-4,
            f"{ACTOR}checkpoint__save_contents": "[model,optimizer,extra,hf_model]",
            "critic__checkpoint__save_contents": "[model,optimizer,extra,hf_model]",
            "critic__optim__lr": 1e-4,
            f"{ROLLOUT}name": "native",
            "custom_reward_function__path": self.folder / "reward.py",
            "trainer__total_training_steps": STEPS,
            "trainer__test_freq": -1,
            "trainer__save_freq": STEPS,
        }
        run_ppo(compose(overrides(self.paths, self.folder / name, **settings | changes)), runner)
        last = self.folder / name / "checkpoints" / f"global_step_{STEPS}"
        files = {str(file.relative_to(last)): load_file(file) for file in sorted(last.rglob("*.safetensors"))}
        weights = {f"{file}: {key}": value for file, tensors in files.items() for key, value in tensors.items()}
        return [json.loads(line)["data"] for line in log.read_text().splitlines()], weights


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def assert_same(found, expected):
    (steps, weights), (expected_steps, expected_weights) = found, expected
    assert len(steps) == len(expected_steps) == STEPS
    for step, other in zip(steps, expected_steps, strict=True):
        names = {name for name in step.keys() | other.keys() if not name.startswith(NOT_COMPARED)}
        assert {"actor/pg_loss", "actor/grad_norm", "actor/entropy"} <= names
        for name in sorted(names):
            assert step[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5, nan_ok=True), name
    assert weights
    assert_close(weights, expected_weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "case", [case if case in FIRST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_run_is_the_same(case, runs):
    expected = runs.train("apart", False, CASES[case])
    assert expected[0][0]["actor/grad_norm"] > 0.1
    assert_same(runs.train("shared", True, CASES[case]), expected)


@pytest.mark.slow
def test_a_run_goes_on_with_the_key_switched(runs):
    expected = runs.train("apart", False, TOKENS | {"trainer__save_freq": 1})
    runs.train("shared", True, TOKENS | {"trainer__save_freq": 1})
    # The first step with shared prompts, the second without.
    (runs.folder / "shared" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    log = runs.folder / "shared.jsonl"
    log.write_text(log.read_text().splitlines()[0] + "\n")
    assert_same(runs.train("shared", False, TOKENS | {"trainer__save_freq": 1}), expected)


@pytest.mark.slow
def test_two_ranks_of_which_one_dies_in_the_update(runs, ray_cluster):
    expected = runs.train("apart", False, RANKS)
    FragileTrainer.deaths = [(2, "update_actor", 1)]
    found = runs.train("shared", True, RANKS, FragileRunner)
    assert not FragileTrainer.deaths
    assert found[0][-1]["recovery/restarts"] == 1
    assert_same(found, expected)
