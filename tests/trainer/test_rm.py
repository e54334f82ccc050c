"""Reward models from preferences, in miniature, and what main_ppo makes of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.models import tiny_model_dir
from tests.preferences import preference_rows, preference_run, write_jsonl
from verl.trainer.rm_trainer import run_rm


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    return preference_run(run_rm, "rm_trainer", tmp_path, tiny_model_dir(tmp_path / "model"), log)


def test_it_learns_the_rule_behind_the_preferences(train, tmp_path):
    many = write_jsonl(tmp_path / "many.jsonl", preference_rows(256, seed=2))
    steps = train(60, data__train_files=many, data__train_batch_size=16)
    # The head starts at zero: all rewards are 0, every pair is a tie.
    assert steps[1]["train/loss"] == pytest.approx(math.log(2))
    assert steps[60]["val/accuracy"] >= 0.9
