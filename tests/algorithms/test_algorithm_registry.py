"""Estimators and losses by name; needs read from parameter names; errors that teach."""

from __future__ import annotations

import re

import pytest
import torch
from torch.testing import assert_close

from verl.algorithms import (
    AdvantageEstimator,
    adv_needs,
    compute_advantages,
    compute_gae_advantage_return,
    compute_policy_loss_vanilla,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    loss_and_metrics,
    policy_loss_columns,
    register_adv_est,
    register_policy_loss,
)
from verl.errors import ConfigError, SchemaError


@pytest.mark.parametrize(
    ("name", "columns", "settings"),
    [
        ("gae", {"token_level_rewards", "values", "response_mask"}, {"gamma", "high_level_gamma", "lam"}),
        ("grpo", {"token_level_rewards", "response_mask", "index"}, {"norm_adv_by_std_in_grpo"}),
        ("rloo", {"token_level_rewards", "response_mask", "index"}, set()),
        ("reinforce_plus_plus", {"token_level_rewards", "response_mask"}, {"gamma", "high_level_gamma"}),
        ("remax", {"token_level_rewards", "response_mask", "reward_baselines"}, set()),
    ],
)
def test_needs_are_the_parameter_names(name: str, columns: set, settings: set):
    needs = adv_needs(name)
    assert (needs.columns, needs.settings, needs.wants_all) == (columns, settings, False)
    assert needs.paper.startswith("https://arxiv.org/abs/")


def test_enum_members_are_names():
    assert AdvantageEstimator.GAE == "gae"
    assert AdvantageEstimator("reinforce_plus_plus") is AdvantageEstimator.REINFORCE_PLUS_PLUS
    assert get_adv_estimator_fn(AdvantageEstimator.GAE) is compute_gae_advantage_return is get_adv_estimator_fn("gae")
    assert adv_needs(AdvantageEstimator.GAE) == adv_needs("gae")


TOKENS = {"token_level_rewards", "response_mask", "index"}


@pytest.mark.parametrize(
    ("name", "columns", "optional", "settings"),
    [
        ("grpo_passk", TOKENS, set(), {"norm_adv_by_std_in_grpo"}),
        ("reinforce_plus_plus_baseline", TOKENS, set(), set()),
        ("opo", TOKENS, set(), set()),
        ("gpg", TOKENS, set(), set()),
        ("maxrl", TOKENS, set(), set()),
        ("grpo_per_turn", TOKENS, set(), {"gamma", "high_level_gamma", "norm_adv_by_std_in_grpo"}),
        ("gdpo", {"response_mask", "index"}, set(),
         {"gdpo_reward_keys", "gdpo_reward_weights", "norm_adv_by_std_in_grpo"}),
        ("optimal_token_baseline", TOKENS | {"old_log_probs", "sum_pi_squared"}, {"rollout_is_weights"}, set()),
        ("tir_optimal_token_baseline", TOKENS | {"old_log_probs", "sum_pi_squared"}, {"rollout_is_weights"}, set()),
    ],
)  # fmt: skip
def test_needs_of_the_wider_catalogue(name: str, columns: set, optional: set, settings: set):
    needs = adv_needs(name)
    assert (needs.columns, needs.optional_columns, needs.settings) == (columns, optional, settings)
    assert needs.wants_all == (name == "gdpo")


def test_an_alias_is_the_same_estimator():
    @register_adv_est("mine", paper="here", aliases=("mine_too",), reproduces={"the paper": ["algorithm.gamma=0.5"]})
    def mine(token_level_rewards, response_mask):
        return token_level_rewards, response_mask

    assert get_adv_estimator_fn("mine_too") is mine
    assert adv_needs("mine_too") == adv_needs("mine")
    assert adv_needs("mine").reproduces == {"the paper": ("algorithm.gamma=0.5",)}
    with pytest.raises(ConfigError, match=r"'mine_too' is registered twice"):

        @register_adv_est("other", aliases=("mine_too",))
        def other(token_level_rewards, response_mask): ...


def test_unknown_names_list_the_known():
    with pytest.raises(ConfigError, match=r"unknown advantage estimator 'grop'.*Did you mean 'grpo'.*rloo"):
        get_adv_estimator_fn("grop")
    with pytest.raises(ConfigError, match=r"unknown advantage estimator 'grpo_pass'.*Did you mean 'grpo_passk'"):
        adv_needs("grpo_pass")
    with pytest.raises(ConfigError, match=r"unknown policy loss 'vanila'.*Did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")


def test_a_user_estimator_gets_what_it_names():
    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, gamma, values=None, index=None, scale=2.0):
        assert values is None
        assert index == ["a"]
        advantages = token_level_rewards * gamma * scale * response_mask
        return advantages, advantages.clone()

    needs = adv_needs("mine")
    assert needs.columns == {"token_level_rewards", "response_mask"}
    assert needs.optional_columns == {"values", "index"}
    columns = {"token_level_rewards": torch.ones(1, 2), "response_mask": torch.ones(1, 2), "index": ["a"], "other": 1}
    advantages, _ = compute_advantages("mine", columns, {"gamma": 0.5, "lam": 9, "scale": 7.0})
    assert_close(advantages, torch.ones(1, 2))  # `scale` is a constant of the estimator


def test_an_estimator_with_kwargs_gets_every_column():
    seen = {}

    @register_adv_est("greedy")
    def greedy(token_level_rewards, response_mask, config=None, **kwargs):
        seen.update(kwargs, config=config)
        return token_level_rewards, token_level_rewards

    columns = {"token_level_rewards": torch.ones(1, 1), "response_mask": torch.ones(1, 1), "acc": [1], "index": ["a"]}
    compute_advantages("greedy", columns, {"config": "the section", "gamma": 1.0})
    assert seen == {"acc": [1], "index": ["a"], "config": "the section"}


def test_a_misspelt_parameter_is_an_error_at_registration():
    with pytest.raises(ConfigError, match=r"'mine' has an unknown parameter 'reward_mask'"):

        @register_adv_est("mine")
        def required(token_level_rewards, reward_mask): ...

    with pytest.raises(ConfigError, match=r"'reponse_mask'.*Did you mean 'response_mask'"):

        @register_adv_est("mine")
        def with_default(token_level_rewards, reponse_mask=None): ...


def test_a_missing_column_names_its_maker():
    columns = {"token_level_rewards": torch.ones(1, 1), "response_mask": torch.ones(1, 1)}
    with pytest.raises(
        SchemaError, match=r"estimator 'gae' needs column 'values'.*has: response_mask, token_level_rew.*critic"
    ):
        compute_advantages("gae", columns, {"gamma": 1.0, "lam": 1.0})
    with pytest.raises(SchemaError, match=r"needs column 'uid'"):
        compute_advantages("grpo", columns, {})


def test_a_missing_setting_is_named():
    columns = {name: torch.ones(1, 1) for name in ("token_level_rewards", "response_mask", "values")}
    with pytest.raises(ConfigError, match=r"'gae' needs settings that are missing: \['lam'\]"):
        compute_advantages("gae", columns, {"gamma": 1.0})


def test_a_name_is_taken_once():
    with pytest.raises(ConfigError, match=r"'gae' is registered twice"):

        @register_adv_est("gae")
        def another(token_level_rewards, response_mask): ...

    assert adv_needs("gae").columns == {"token_level_rewards", "values", "response_mask"}


ARGUMENTS = {
    "old_log_prob": 1, "log_prob": 2, "advantages": 3, "response_mask": 4, "loss_agg_mode": "token-mean", "config": 5,
    "rollout_is_weights": None,
}  # fmt: skip


def test_policy_losses_by_name():
    assert get_policy_loss_fn("vanilla") is compute_policy_loss_vanilla
    assert policy_loss_columns("vanilla") == frozenset()


def test_a_policy_loss_may_leave_out_what_it_does_not_read():
    @register_policy_loss("short")
    def short(log_prob, advantages, response_mask):
        return log_prob + advantages + response_mask, {}

    assert get_policy_loss_fn("short")(**ARGUMENTS) == (9, {})


def test_a_policy_loss_may_ask_for_columns():
    @register_policy_loss("with_rollout")
    def with_rollout(log_prob, rollout_log_probs, beta=0.1):
        return log_prob * rollout_log_probs, {"beta": beta}

    assert policy_loss_columns("with_rollout") == {"rollout_log_probs"}
    assert get_policy_loss_fn("with_rollout")(**ARGUMENTS, rollout_log_probs=7) == (14, {"beta": 0.1})


def test_a_policy_loss_with_an_unknown_parameter_is_an_error_at_registration():
    with pytest.raises(
        ConfigError, match=r"policy loss 'mine' has an unknown parameter 'old_log_probs'.*Did you mean 'old_log_prob'"
    ):

        @register_policy_loss("mine")
        def plural(old_log_probs, log_prob): ...


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (lambda rewards: rewards, "Tensor (2, 3)"),
        (lambda rewards: (rewards.sum(-1), rewards.sum(-1)), "tuple of Tensor (2,), Tensor (2,)"),
        (lambda rewards: (rewards, rewards, {}), "tuple of Tensor (2, 3), Tensor (2, 3), dict"),
        (lambda rewards: None, "NoneType"),
    ],
)
def test_what_an_estimator_may_not_return(result, described):
    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask):
        return result(token_level_rewards)

    columns = {"token_level_rewards": torch.zeros(2, 3), "response_mask": torch.ones(2, 3)}
    with pytest.raises(
        SchemaError, match=rf"'mine' returned {re.escape(described)}; .*\(2, 3\), that of response_mask"
    ):
        compute_advantages("mine", columns, {})


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (torch.tensor(1.0), "Tensor ()"),
        ((torch.tensor(1.0), torch.tensor(0.0)), "tuple of Tensor (), Tensor ()"),
        ((torch.zeros(2, 3), {}), "tuple of Tensor (2, 3), dict"),
        ((1.0, {}), "tuple of float, dict"),
    ],
)
def test_what_a_policy_loss_may_not_return(result, described):
    with pytest.raises(SchemaError, match=rf"policy loss 'mine' returned {re.escape(described)}; it should return"):
        loss_and_metrics("mine", result)
