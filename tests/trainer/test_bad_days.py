"""Runs on days when the data, the rewards or the machine are not as they should be."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.tiny_run import make_tiny_run, overrides
from verl.trainer.config.overrides import compose
from verl.trainer.main_ppo import run_ppo

ACTOR = "actor_rollout_ref__actor"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run with a reward function and changed settings; the metrics of every step."""
    paths, log = make_tiny_run(tmp_path), tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(reward: str = "len(solution_str) % 3 / 2", **changes: object) -> dict[int, dict[str, float]]:
        (tmp_path / "reward.py").write_text(
            f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {reward}\n"
        )
        settings = {"custom_reward_function__path": tmp_path / "reward.py", "trainer__total_training_steps": 1}
        run_ppo(compose(overrides(paths, tmp_path, **settings | changes)))
        return {r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())}

    return run


def not_finite(metrics: dict[str, float]) -> list[str]:
    return [name for name, value in metrics.items() if not math.isfinite(value)]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_equal_rewards_teach_nothing_and_harm_nothing(train, estimator):
    metrics = train("0.25", algorithm__adv_estimator=estimator)[1]
    assert metrics["critic/advantages/zero_ratio"] == 1
    assert metrics["actor/grad_norm"] == 0
    assert metrics["actor/skipped_steps"] == 0
    assert not_finite(metrics) == []


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_a_batch_of_one_sequence(train, estimator):
    sizes = ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu")
    one = {f"{section}__{size}": 1 for section in (ACTOR, "critic") for size in sizes} | {"data__train_batch_size": 1}
    metrics = train(
        "0.25",
        algorithm__adv_estimator=estimator,
        actor_rollout_ref__rollout__n=1,
        data__max_response_length=1,  # of one token, at that
        **one,
    )[1]
    assert metrics["response_length/max"] == 1
    assert metrics["actor/skipped_steps"] == 0
    # One token has no variance, so there is nothing to correlate or to explain.
    needs_two = ["training/rollout_actor_probs_pearson_corr", *["critic/vf_explained_var"] * (estimator == "gae")]
    assert sorted(not_finite(metrics)) == sorted(needs_two)
