"""Whole runs on Ray whose rollout is one model over two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from tests.trainer.test_run import assert_same_steps
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo


@pytest.mark.slow
def test_grpo_with_one_model_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None) -> None:
    """The numbers of two steps and of validation are those of an engine in each rank."""
    log, paths = tmp_path / "metrics.jsonl", make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def train(ranks_per_engine: int) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {
            "custom_reward_function__path": tmp_path / "reward.py",
            "actor_rollout_ref__rollout__name": "native",
            "actor_rollout_ref__rollout__tensor_model_parallel_size": ranks_per_engine,
            "trainer__controller": "ray",
            "trainer__n_gpus_per_node": 2,
            "trainer__total_training_steps": 2,
            "trainer__test_freq": 1,
            "trainer__save_freq": -1,
        }
        run_ppo(compose(overrides(paths, tmp_path / str(ranks_per_engine), **settings)))
        return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}

    whole, split = train(1), train(2)
    assert split[2]["actor/grad_norm"] > 0
    assert max(split[step]["training/rollout_probs_diff_max"] for step in (1, 2)) < 1e-5
    assert_same_steps(whole, split, rel=1e-4)
