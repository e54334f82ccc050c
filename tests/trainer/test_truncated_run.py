"""Whole runs that train on truncated samples: the weights are the probability mass that was kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

ROLLOUT = "actor_rollout_ref__rollout"
CORRECTION = "algorithm__rollout_correction"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One step with changed settings; its metrics."""
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return len(set(solution_str)) / 8\n"
    )
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(**changes: object) -> dict[str, float]:
        log.unlink(missing_ok=True)
        settings = {"custom_reward_function__path": tmp_path / "reward.py", "trainer__total_training_steps": 1}
        run_ppo(compose(overrides(paths, tmp_path, **settings, **changes)))
        return {r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())}[1]

    return run


def test_token_weights_of_a_nucleus_are_its_mass(train):
    step = train(**{f"{ROLLOUT}__top_p": 0.8})  # rollout_is=token is the default of truncated sampling
    # The kept tokens have at least 0.8 of the mass and at most all of it, at every place.
    assert 0.8 - 1e-4 < step["rollout_corr/rollout_is_min"] < step["rollout_corr/rollout_is_max"] < 1 + 1e-4
    assert step["rollout_corr/rollout_is_ratio_fraction_high"] == 0.0
    assert 0.8 < step["rollout_corr/rollout_is_mean"] < 0.99
    assert step["rollout_corr/kl"] > 0.01  # log μ - log π > 0
    assert step["training/rollout_probs_diff_max"] > 1e-3  # by design
    assert step["actor/grad_norm"] > 0


def test_the_bypass_mode_clips_against_what_was_sampled_from(train):
    step = train(**{f"{ROLLOUT}__top_k": 5, f"{CORRECTION}__bypass_mode": "true"})
    assert step["rollout_corr/kl"] > 0.1  # five tokens of a hundred: much less than all of the mass
    assert step["actor/ppo_kl"] == step["rollout_corr/kl"]
    assert step["actor/grad_norm"] > 0


def test_with_the_sampling_mask_rollout_and_trainer_agree(train):
    mask = {f"{ROLLOUT}__name": "native", f"{ROLLOUT}__keep_sampling_mask": "true"}
    step = train(**mask, **{f"{ROLLOUT}__top_p": 0.8, f"{CORRECTION}__rollout_is": "sequence"})
    assert step["training/sampling_mask/unknown"] == 0
    assert 1 < step["training/sampling_mask/size"] <= 64
    assert step["training/rollout_probs_diff_max"] < 1e-5
    assert step["rollout_corr/rollout_is_min"] == pytest.approx(1.0, abs=1e-4)
    assert step["rollout_corr/rollout_is_max"] == pytest.approx(1.0, abs=1e-4)
    assert abs(step["rollout_corr/kl"]) < 1e-5
    assert abs(step["rollout_corr/chi2_seq"]) < 1e-3
