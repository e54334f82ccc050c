"""Every estimator by its name, with the settings that it needs and those that follow from it."""

from __future__ import annotations

import pytest

from tests.trainer.config.support import Run, only
from verl.algorithms import adv_needs, estimator_names

EXTRA = {
    "gdpo": {"algorithm.gdpo_reward_keys": ["accuracy", "format"]},
    "hierarchical_grpo": {"algorithm.episode_agents": ["solver"]},
}


def settings(run: Run, name: str) -> dict:
    """What a run with this estimator needs, with a reference beside it."""
    critic = {"critic.model.path": str(run.folder / "model"), "critic.ppo_micro_batch_size_per_gpu": 1}
    return {
        "algorithm.adv_estimator": name,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1,
        **(critic if "values" in adv_needs(name).columns else {}),
        **EXTRA.get(name, {}),
    }


@pytest.mark.parametrize("name", estimator_names())
def test_every_estimator_loads(run: Run, name: str):
    config = run.load(settings(run, name))
    assert config.algorithm.adv_estimator == name
    reads = "sum_pi_squared" in adv_needs(name).columns
    assert config.actor_rollout_ref.actor.calculate_sum_pi_squared == reads


def test_sum_pi_squared_can_be_asked_for(run: Run):
    key = "actor_rollout_ref.actor.calculate_sum_pi_squared"
    assert run.load({key: True}).actor_rollout_ref.actor.calculate_sum_pi_squared


@pytest.mark.parametrize("name", ["maxrl", "gdpo"])
def test_kl_in_the_reward_where_it_cannot_be(run: Run, name: str):
    message = only(run.refusal(settings(run, name) | {"algorithm.use_kl_in_reward": True}))
    assert f"algorithm.adv_estimator={name} cannot have KL in the reward: it " in message
    assert "actor_rollout_ref.actor.use_kl_loss=true" in message


def test_gdpo_needs_its_components(run: Run):
    message = only(run.refusal({"algorithm.adv_estimator": "gdpo"}))
    assert "algorithm.gdpo_reward_keys=null: algorithm.adv_estimator=gdpo compares components" in message
    message = only(run.refusal(settings(run, "gdpo") | {"algorithm.gdpo_reward_weights": [1.0]}))
    assert "algorithm.gdpo_reward_weights=[1.0]" in message
    assert "names 2 components: accuracy, format" in message
    config = run.load(settings(run, "gdpo") | {"algorithm.gdpo_reward_weights": [1.0, 0.5]})
    assert config.algorithm.gdpo_reward_weights == (1.0, 0.5)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_what_a_skipped_pass_would_compute_is_missed(run: Run, name: str):
    message = run.refusal(settings(run, name) | {"algorithm.rollout_correction.bypass_mode": True})
    correction = "algorithm.rollout_correction"
    for change, setting in (({"bypass_mode": True}, "bypass_mode=true"), ({"prox_logp_method": "loglinear"}, "")):
        keys = {f"{correction}.{key}": value for key, value in change.items()}
        message = run.refusal(settings(run, name) | keys)
        assert f"algorithm.adv_estimator={name}: it reads Σπ², which the pass would compute" in message
        assert f"that {correction}.{setting}" in message


def test_pf_ppo_loads(run: Run):
    changes = {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo.reweight_method": "max_min"}
    assert run.load(changes).algorithm.pf_ppo.reweight_method == "max_min"
    message = only(run.refusal({"algorithm.pf_ppo.reweight_method": "max"}))
    assert "pow, max_min, max_random" in message


def test_gdpo_components_are_named_once(run: Run):
    message = only(run.refusal(settings(run, "gdpo") | {"algorithm.gdpo_reward_keys": ["accuracy", "accuracy"]}))
    assert "algorithm.gdpo_reward_keys" in message
    assert "named twice" in message
