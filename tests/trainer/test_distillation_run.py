"""Whole runs that learn from teachers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from verl.errors import DataError
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

LOSS = "distillation__distillation_loss"
TEACHERS = "distillation__teacher_models"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    rows = countdown_rows(16)
    for row in rows[::2]:
        row["data_source"] = "math"
    paths["train"] = write_jsonl(tmp_path / "train.jsonl", rows)
    teacher = tiny_model_dir(tmp_path / "teacher", family="qwen3", seed=7)
    (tmp_path / "reward.py").write_text("def compute_score(solution_str, **_):\n    return 0.0\n")
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(**changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {
            "custom_reward_function__path": tmp_path / "reward.py",
            "actor_rollout_ref__rollout__name": "native",
            "distillation__enabled": "true",
            f"{TEACHERS}__math__model_path": teacher,
            f"{TEACHERS}__math__key": "math",
            f"{TEACHERS}__itself__model_path": paths["model"],
            f"{TEACHERS}__itself__key": "countdown",
            f"{LOSS}__use_task_rewards": "false",
        } | changes
        run_ppo(compose(overrides(paths, tmp_path / "run", **settings)))
        return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}

    return run


def test_rows_go_to_the_teacher_of_their_source_and_the_policy_learns_from_it(train):
    steps = train(trainer__total_training_steps=4, actor_rollout_ref__actor__ppo_mini_batch_size=4)
    first = steps[1]
    # Who is taught by a copy of itself differs by nothing, as long as every token is paired with its own.
    assert first["distillation/kl/countdown"] == pytest.approx(0, abs=1e-5)
    assert first["distillation/kl/math"] > 1
    mean = (first["distillation/kl/countdown"] + first["distillation/kl/math"]) / 2
    assert first["distillation/kl"] == pytest.approx(mean, rel=0.2)  # weighted by tokens
    assert first["timing_s/teacher"] > 0
    assert first["distillation/teacher_entropy"] > 0
    assert steps[4]["distillation/loss"] < first["distillation/loss"]


def test_a_row_without_a_teacher_is_refused_before_a_model_loads(train):
    with pytest.raises(DataError, match="row 1 has data_source='countdown', and no teacher has this key"):
        train(**{f"{TEACHERS}__itself__key": "code"})
