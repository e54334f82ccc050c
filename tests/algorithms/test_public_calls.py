"""Estimators, losses and registries called as public code calls them."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf
from torch import tensor
from torch.testing import assert_close

from verl.errors import ConfigError
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

CONFIG = {"gamma": 0.5, "lam": 0.5, "norm_adv_by_std_in_grpo": False, "gdpo_reward_keys": ["fmt"]}


def columns() -> dict:
    ones = torch.ones(4, 2)
    return {
        "token_level_rewards": tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 5.0], [1.0, 0.0]]),
        "response_mask": ones,
        "index": ["a", "a", "b", "b"],
        "values": 0.5 * ones,
        "reward_baselines": tensor([1.0, 1.0, 2.0, 2.0]),
        "old_log_probs": -ones,
        "sum_pi_squared": 0.5 * ones,
        "turn_ids": None,
    }


@pytest.mark.parametrize(
    "name", sorted(set(ADV_ESTIMATOR_REGISTRY) - {"gdpo", "grpo_per_turn", "gigpo", "hierarchical_grpo", "rae"})
)
def test_every_estimator_takes_all_columns_config_and_epsilon(name: str):
    given = {key: value for key, value in columns().items() if value is not None}
    results = [
        ADV_ESTIMATOR_REGISTRY[name](**given, config=config, epsilon=1e-6)
        for config in (CONFIG, OmegaConf.create(CONFIG))
    ]
    assert results[0][0].shape == (4, 2)
    assert_close(results[0], results[1])


def test_settings_of_the_config_are_used_and_arguments_win():
    rewards, mask = tensor([[0.0, 0.0, 4.0]]), torch.ones(1, 3)
    discounted = core_algos.compute_reinforce_plus_plus_outcome_advantage
    # 4, and half of it one token earlier, and half of that
    assert discounted(rewards, mask, config=CONFIG)[1].tolist() == [[1.0, 2.0, 4.0]]
    assert discounted(rewards, mask)[1].tolist() == [[4.0, 4.0, 4.0]]
    assert discounted(rewards, mask, gamma=0.0, config=CONFIG)[1].tolist() == [[0.0, 0.0, 4.0]]
    assert discounted(rewards, mask, 0.0, config=CONFIG)[1].tolist() == [[0.0, 0.0, 4.0]]
    # rewards 3 and 1, mean 2; not divided by the standard deviation
    grpo = core_algos.compute_grpo_outcome_advantage
    pair = tensor([[3.0], [1.0]]), torch.ones(2, 1), ["a", "a"]
    assert grpo(*pair, config=CONFIG)[0].tolist() == [[1.0], [-1.0]]
    with pytest.raises(TypeError, match="gama"):
        discounted(rewards, mask, gama=0.5)


def test_registries_are_mappings_that_register():
    assert ADV_ESTIMATOR_REGISTRY["grpo"] is core_algos.compute_grpo_outcome_advantage
    assert POLICY_LOSS_REGISTRY["vanilla"] is core_algos.compute_policy_loss_vanilla
    assert ADV_ESTIMATOR_REGISTRY.get("grop") is None
    assert {"gspo", "cispo"} <= POLICY_LOSS_REGISTRY.keys()

    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
        return log_prob.sum(), {}

    def advantage(token_level_rewards, response_mask):
        return token_level_rewards, token_level_rewards

    POLICY_LOSS_REGISTRY["mine"] = mine
    assert core_algos.get_policy_loss_fn("mine") is mine
    del POLICY_LOSS_REGISTRY["mine"]
    assert "mine" not in POLICY_LOSS_REGISTRY
    for _ in range(2):  # the cell of a notebook, run twice: the second definition holds
        core_algos.register_adv_est("again")(advantage)
    with pytest.raises(ConfigError, match="'gae' is registered twice"):
        core_algos.register_adv_est("gae")(advantage)


def test_policy_loss_of_three_tensors():
    old, new, advantages = torch.zeros(1, 2), tensor([[1.5, 1.0]]).log(), tensor([[1.0, -2.0]])
    # clipped at 1.2: -(1.2 · 1), and 2 · 1
    loss, clipped, _, _ = core_algos.compute_policy_loss(old, new, advantages)
    assert loss.item() == pytest.approx((-1.2 + 2.0) / 2)
    assert clipped.item() == 0.5


def test_losses_take_a_section_of_omegaconf_with_null_and_return_floats():
    config = OmegaConf.create({"clip_ratio": 0.1, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0})
    tensors = torch.zeros(1, 1), tensor([[1.5]]).log(), torch.ones(1, 1), torch.ones(1, 1)
    loss, metrics = core_algos.compute_policy_loss_vanilla(*tensors, config=config)
    assert loss.item() == pytest.approx(-1.1)
    assert metrics["actor/pg_clipfrac"] == 1.0
    assert all(type(value) is float for value in metrics.values())


def test_reinforce_by_hand():
    log_prob = tensor([[-1.0, -2.0, -9.0]], requires_grad=True)
    weights = tensor([[2.0, 0.5, 7.0]])
    loss, metrics = core_algos.compute_policy_loss_reinforce(
        tensor([[-2.0, -2.0, 0.0]]), log_prob, tensor([[3.0, -4.0, 1.0]]), tensor([[1, 1, 0]]),
        rollout_is_weights=weights,
    )  # fmt: skip
    # -(2 · 3 · -1) - (½ · -4 · -2) = 6 - 4
    assert loss.item() == pytest.approx(2.0)
    assert metrics == {"actor/ppo_kl": pytest.approx(-0.5)}
    loss.backward()
    assert log_prob.grad.tolist() == [[-6.0, 2.0, 0.0]]


def test_forward_value_of_the_kl_penalty():
    new, old = tensor([-1.0], requires_grad=True), tensor([-3.0])
    value = core_algos.kl_penalty_forward(new, old, "mse")
    assert value.item() == 2.0  # ½ · 2²
    straight = core_algos.kl_penalty(new, old, "k1+")
    assert straight.item() == core_algos.kl_penalty_forward(new, old, "k1+").item() == 2.0
