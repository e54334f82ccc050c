"""What only a whole run can show of an algorithm: its stages meet, its columns reach every rank, its numbers appear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from tests.trainer.test_run import assert_same_steps
from verl.algorithms import estimator_names, policy_loss_names
from verl.errors import ConfigError
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

ACTOR = "actor_rollout_ref__actor"
CORRECTION = "algorithm__rollout_correction"

# What an estimator or a loss asks for beside its name.
ESTIMATOR_SETTINGS: dict[str, dict[str, object]] = {
    "gdpo": {"algorithm__gdpo_reward_keys": "[digits,length]"},
    "optimal_token_baseline": {f"{ACTOR}__calculate_sum_pi_squared": "true"},
    "tir_optimal_token_baseline": {f"{ACTOR}__calculate_sum_pi_squared": "true"},
    "gae": {"critic__ppo_mini_batch_size": 2},
}
LOSS_SETTINGS: dict[str, dict[str, object]] = {
    "bypass_mode": {f"{CORRECTION}__bypass_mode": "true"},
    "dro": {f"{ACTOR}__policy_loss__dro_beta": 0.1},
    "clip_cov": {f"{ACTOR}__policy_loss__clip_cov_ratio": 0.1, f"{ACTOR}__policy_loss__clip_cov_lb": -1.0},
    "kl_cov": {f"{ACTOR}__policy_loss__kl_cov_ratio": 0.1},
}


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run with changed settings; the metrics of every step."""
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    digits = sum(c.isdigit() for c in solution_str) / 8\n"
        "    return {'score': digits, 'digits': digits, 'length': len(solution_str) / 8}\n"
    )
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(**changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {"custom_reward_function__path": tmp_path / "reward.py"} | changes
        run_ppo(compose(overrides(paths, tmp_path, **settings)))
        return {r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())}

    return run


# Those that differ in what a run does for them: a group, none, a critic, greedy responses, several rewards, Σπ².
OWN_STAGES = ("grpo", "reinforce_plus_plus", "gae", "remax", "gdpo", "optimal_token_baseline")


@pytest.mark.parametrize(
    "name",
    [name if name in OWN_STAGES else pytest.param(name, marks=pytest.mark.slow) for name in estimator_names()],
)
def test_every_estimator_trains(train, name):
    steps = train(algorithm__adv_estimator=name, trainer__total_training_steps=1, **ESTIMATOR_SETTINGS.get(name, {}))
    assert steps[1]["actor/grad_norm"] > 0
    assert steps[1]["critic/advantages/max"] > steps[1]["critic/advantages/min"]


@pytest.mark.slow
@pytest.mark.parametrize("name", policy_loss_names())
def test_every_policy_loss_trains(train, name):
    changes = {f"{ACTOR}__policy_loss__loss_mode": name} | LOSS_SETTINGS.get(name, {})
    steps = train(trainer__total_training_steps=1, **changes)
    assert steps[1]["actor/grad_norm"] > 0


def test_all_that_looks_at_whole_mini_batches_is_the_same_on_two_ranks(train, ray_cluster):
    # Selection by covariance and by entropy, groups that weigh the same, weights normalised over the batch, rejection,
    # an entropy coefficient that moves: each would change with the layout if a rank decided it by itself.
    changes = {
        f"{ACTOR}__policy_loss__loss_mode": "clip_cov",
        **LOSS_SETTINGS["clip_cov"],
        f"{ACTOR}__policy_loss__top_entropy_quantile": 0.5,
        f"{ACTOR}__loss_agg_mode": "prompt-mean",
        f"{ACTOR}__entropy_target": 10.0,
        f"{ACTOR}__entropy_target_step": 0.01,
        f"{CORRECTION}__rollout_is": "token",
        f"{CORRECTION}__rollout_is_batch_normalize": "true",
        "algorithm__use_pf_ppo": "true",
    }
    local = train(**changes)
    ray = train(trainer__controller="ray", trainer__n_gpus_per_node=2, **changes)
    assert_same_steps(local, ray, rel=1e-5)
    assert local[2]["actor/entropy_coeff"] > local[1]["actor/entropy_coeff"]
    assert local[1]["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-4)


def test_prompts_weigh_the_same_in_the_critic_too(train):
    # Mini-batches of other sizes: actor and critic each need weights of their own. All responses are equally long
    # here, so equal weights of prompts are equal weights of tokens.
    changes = {"algorithm__adv_estimator": "gae", "critic__ppo_mini_batch_size": 4}
    by_prompt = train(trainer__total_training_steps=1, **changes, **{f"{ACTOR}__loss_agg_mode": "prompt-mean"})
    by_token = train(trainer__total_training_steps=1, **changes)
    assert by_token[1]["response_length/min"] == by_token[1]["response_length/max"]
    assert by_prompt[1]["critic/grad_norm"] == pytest.approx(by_token[1]["critic/grad_norm"], rel=1e-5)
    assert by_prompt[1]["critic/vf_loss"] == pytest.approx(by_token[1]["critic/vf_loss"], rel=1e-5)


def test_bypass_mode_takes_the_rollouts_log_probs(train):
    changes = {f"{CORRECTION}__bypass_mode": "true", f"{ACTOR}__ppo_mini_batch_size": 4}
    bypass = train(trainer__total_training_steps=1, **changes)[1]
    plain = train(trainer__total_training_steps=1, **{f"{ACTOR}__ppo_mini_batch_size": 4})[1]
    assert "actor/entropy" in plain
    assert "actor/entropy" not in bypass  # there is no pass that would know it
    # The hf engine and the trainer agree to rounding, so the one update of the step is the same.
    assert bypass["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)


def test_rejected_tokens_are_not_learned_from_but_keep_their_reward(train):
    # A band around a ratio of 1 that rounding alone leaves: most tokens are rejected, some are not.
    changes = {f"{CORRECTION}__rollout_rs": "token_k1", f"{CORRECTION}__rollout_rs_threshold": "0.99999995_1.00000005"}
    steps = train(**changes)
    assert steps[1]["rollout_corr/rollout_rs_masked_fraction"] > 0
    plain = train()
    assert steps[1]["critic/rewards/mean"] == pytest.approx(plain[1]["critic/rewards/mean"])


@pytest.mark.slow
def test_the_entropy_coefficient_is_part_of_a_checkpoint(train, tmp_path):
    changes = {f"{ACTOR}__entropy_target": 10.0, f"{ACTOR}__entropy_target_step": 0.01}
    straight = train(trainer__total_training_steps=3, trainer__default_local_dir=tmp_path / "a", **changes)
    other = {"trainer__default_local_dir": tmp_path / "b", **changes}
    train(trainer__total_training_steps=2, trainer__save_freq=2, **other)
    rest = train(trainer__total_training_steps=3, **other)
    assert_same_steps({3: straight[3]}, rest, rel=0)
    assert rest[3]["actor/entropy_coeff"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{CORRECTION}__bypass_mode": "true", f"{ACTOR}__policy_loss__top_entropy_quantile": 0.2}, "entropy"),
        ({f"{CORRECTION}__bypass_mode": "true", f"{ACTOR}__entropy_target": 1.0}, "entropy"),
        (
            {f"{CORRECTION}__bypass_mode": "true", "algorithm__adv_estimator": "optimal_token_baseline"}
            | ESTIMATOR_SETTINGS["optimal_token_baseline"],
            "Σπ²",
        ),
    ],
)
def test_bypass_mode_refuses_what_its_missing_pass_would_have_computed(train, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(**changes)
