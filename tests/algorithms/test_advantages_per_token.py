"""Baselines per token and per turn: numbers by hand, reductions, tool outputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from tests.support.estimators import random_batch
from verl.algorithms import (
    compute_advantages,
    compute_grpo_outcome_advantage,
    compute_grpo_per_turn_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
    compute_remax_outcome_advantage,
)

OTB = [compute_optimal_token_baseline_advantage, compute_multi_turn_optimal_token_baseline_advantage]


def otb_arguments(batch: dict, *, weights: bool = False) -> dict:
    names = ["token_level_rewards", "response_mask", "index", "old_log_probs", "sum_pi_squared"]
    return {name: batch[name] for name in [*names, *(["rollout_is_weights"] if weights else [])]}


def contiguous(seed: int, lengths: list[int], width: int = 6) -> dict:
    """Responses without holes."""
    batch = random_batch(seed, [0] * len(lengths), width, density=1.1)
    batch["response_mask"] = (torch.arange(width) < tensor(lengths).unsqueeze(-1)).long()
    return batch


# ---- optimal token baseline ---------------------------------------------------------------------


@pytest.mark.proof("by hand", "optimal_token_baseline", "tir_optimal_token_baseline")
@pytest.mark.parametrize("estimator", OTB)
def test_otb_by_hand(estimator):
    # Two siblings, R = 1 and 3 on the last token, of 2 and 3 tokens.
    # π = 1/2 and Σπ² = 1/2: w = 1 - 1 + 1/2 = 1/2.  π = 1/4 and Σπ² = 3/4: w = 1 - 1/2 + 3/4 = 5/4.
    # First: W = 1/2, 1.  Second: w = 5/4, 1/2, 1/2: W = 5/4, 7/4, 9/4.
    # B_0 = (1·1/2 + 3·5/4)/(7/4) = (17/4)/(7/4) = 17/7,  B_1 = (1·1 + 3·7/4)/(11/4) = 25/11,  alone at 2: B_2 = 0
    half, quarter = math.log(0.5), math.log(0.25)
    advantages, returns = estimator(
        tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 3.0]]),
        tensor([[1, 1, 0], [1, 1, 1]]),
        ["p", "p"],
        tensor([[half, half, 0.0], [quarter, half, half]]),
        tensor([[0.5, 0.5, 0.0], [0.75, 0.5, 0.5]]),
    )
    assert_close(returns, tensor([[1.0, 1.0, 0.0], [3.0, 3.0, 3.0]]))
    assert_close(advantages, tensor([[1 - 17 / 7, 1 - 25 / 11, 0.0], [3 - 17 / 7, 3 - 25 / 11, 3.0]]))


@pytest.mark.proof("by hand", "optimal_token_baseline")
def test_otb_without_the_rule_for_the_tail_is_its_own_baseline_there():
    batch = contiguous(0, [2, 5])
    with_rule, returns = compute_optimal_token_baseline_advantage(**otb_arguments(batch))
    without, _ = compute_optimal_token_baseline_advantage(**otb_arguments(batch), handle_zero_tail=False)
    assert_close(with_rule[:, :2], without[:, :2])
    assert_close(with_rule[1, 2:], returns[1, 2:])
    assert_close(without[1, 2:], torch.zeros(4), atol=1e-6, rtol=0)
    alone = {k: v[:1] for k, v in otb_arguments(batch).items()}
    assert_close(compute_optimal_token_baseline_advantage(**alone, handle_zero_tail=False)[0], returns[:1])


@pytest.mark.proof("by hand", "optimal_token_baseline", "tir_optimal_token_baseline")
@pytest.mark.parametrize("estimator", OTB)
def test_otb_importance_weights_enter_squared_and_per_token(estimator):
    # One token each, w = 1 and 1, ρ = 1 and 2: B = (1·1 + 3·4)/5 = 13/5
    certain = tensor([[-math.inf], [-math.inf]])  # π = 0 and Σπ² = 0: w = 1
    advantages, _ = estimator(
        tensor([[1.0], [3.0]]), torch.ones(2, 1), ["p", "p"], certain, torch.zeros(2, 1), tensor([[1.0], [2.0]])
    )
    assert_close(advantages, tensor([[1 - 2.6], [3 - 2.6]]))


@pytest.mark.proof("reductions", "optimal_token_baseline", "tir_optimal_token_baseline")
@pytest.mark.parametrize("estimator", OTB)
def test_otb_of_a_uniform_policy_is_the_plain_mean_at_each_token(estimator):
    # Every w is 1 - 2/V + 1/V, so that siblings that reach t weigh the same there.
    batch, vocabulary = contiguous(1, [6, 6, 6]), 10
    batch["old_log_probs"] = torch.full((3, 6), -math.log(vocabulary))
    batch["sum_pi_squared"] = torch.full((3, 6), 1 / vocabulary)
    advantages, returns = estimator(**otb_arguments(batch))
    assert_close(advantages, returns - returns.mean(0), atol=1e-5, rtol=1e-5)
    outcome = torch.zeros(3, 6)
    outcome[:, -1] = batch["token_level_rewards"][:, -1]
    plain, _ = compute_grpo_outcome_advantage(
        outcome, batch["response_mask"], batch["index"], norm_adv_by_std_in_grpo=False
    )
    found, _ = estimator(**{**otb_arguments(batch), "token_level_rewards": outcome})
    assert_close(found, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.proof("reductions", "optimal_token_baseline", "tir_optimal_token_baseline")
@pytest.mark.parametrize("estimator", OTB)
def test_otb_alone_is_remax_without_a_baseline(estimator):
    batch = random_batch(2, [0])
    plain = compute_remax_outcome_advantage(batch["token_level_rewards"], torch.zeros(1), batch["response_mask"])
    assert_close(estimator(**otb_arguments(batch)), plain)


@pytest.mark.proof("reductions", "optimal_token_baseline", "tir_optimal_token_baseline")
@pytest.mark.parametrize("estimator", OTB)
def test_otb_equal_importance_weights_cancel(estimator):
    batch = contiguous(3, [4, 6, 5])
    batch["rollout_is_weights"] = torch.full((3, 6), 1.7)
    assert_close(
        estimator(**otb_arguments(batch, weights=True)), estimator(**otb_arguments(batch)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.proof("reductions", "tir_optimal_token_baseline")
def test_tir_otb_without_tool_tokens_is_otb():
    batch = contiguous(4, [4, 6, 2, 6])
    arguments = otb_arguments(batch, weights=True)
    assert_close(
        compute_multi_turn_optimal_token_baseline_advantage(**arguments),
        compute_optimal_token_baseline_advantage(**arguments),
    )


def spread_out(column: Tensor, places: Tensor, width: int) -> Tensor:
    return torch.full((len(column), width), 9, dtype=column.dtype).scatter(1, places, column)


@pytest.mark.proof("masks", "tir_optimal_token_baseline")
def test_tir_otb_does_not_see_where_tools_spoke():
    # The same tokens, with the output of tools between them at other places in every row.
    batch, width = contiguous(5, [6, 6, 6]), 15
    generator = torch.Generator().manual_seed(0)
    places = torch.stack([torch.randperm(width, generator=generator)[:6].sort().values for _ in range(3)])
    arguments = otb_arguments(batch, weights=True)
    spread = {k: spread_out(v, places, width) for k, v in arguments.items() if k != "index"}
    spread["response_mask"] = torch.zeros(3, width, dtype=torch.long).scatter(1, places, 1)
    plain = compute_multi_turn_optimal_token_baseline_advantage(**arguments)
    found = compute_multi_turn_optimal_token_baseline_advantage(**spread, index=arguments["index"])
    for one, other in zip(plain, found, strict=True):
        assert_close(other.gather(1, places), one)
    elsewhere, _ = compute_optimal_token_baseline_advantage(**spread, index=arguments["index"])
    assert not torch.allclose(elsewhere.gather(1, places), plain[0])


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_otb_by_its_name_takes_importance_weights_if_there_are(name):
    batch = random_batch(6)
    without = {k: v for k, v in batch.items() if k != "rollout_is_weights"}
    assert not torch.equal(compute_advantages(name, batch, {})[0], compute_advantages(name, without, {})[0])


# ---- per turn -----------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "grpo_per_turn")
def test_per_turn_by_hand():
    # Turns of the rows (| is a tool): [1, 1] | [1];  [1] | [1, 1];  [1, 1, 1] alone.  γ = 1/2.
    # R = (1, 4), (3, 0), (2):  G = (1 + 2, 4) = (3, 4), (3 + 0, 0) = (3, 0), (2)
    # First turn: 3, 3, 2: mean 8/3.  Second: 4, 0: mean 2.
    rewards = tensor([[0.0, 1.0, 7.0, 4.0], [3.0, 7.0, 0.0, 0.0], [0.0, 0.0, 2.0, 7.0]])
    mask = tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0]])
    plain, _ = compute_grpo_per_turn_advantage(rewards, mask, ["p"] * 3, gamma=0.5, norm_adv_by_std_in_grpo=False)
    third = 1 / 3
    assert_close(plain, tensor([[third, third, 0, 2], [third, 0, -2, -2], [-2 * third] * 3 + [0]]))
    # Deviations: √((1 + 1 + 4)/9/2) = √(1/3), and √8
    scaled, returns = compute_grpo_per_turn_advantage(rewards, mask, ["p"] * 3, gamma=0.5)
    scale = tensor([[math.sqrt(third)] * 3 + [math.sqrt(8)], [math.sqrt(third)] * 2 + [math.sqrt(8)] * 2,
                    [math.sqrt(third)] * 4]) + 1e-6  # fmt: skip
    assert_close(scaled, plain / scale)
    assert_close(returns, scaled)
    assert returns.data_ptr() != scaled.data_ptr()


@pytest.mark.proof("by hand", "grpo_per_turn")
def test_per_turn_where_nobody_else_gets_that_far():
    # The second turn is one row's alone: baseline 0, scale 1 + ε.
    rewards, mask = tensor([[1.0, 0.0, 5.0], [2.0, 0.0, 0.0]]), tensor([[1, 0, 1], [1, 0, 0]])
    found, _ = compute_grpo_per_turn_advantage(rewards, mask, ["p", "p"], gamma=0.0)
    root = math.sqrt(0.5) + 1e-6
    assert_close(found, tensor([[-0.5 / root, 0.0, 5 / (1 + 1e-6)], [0.5 / root, 0.0, 0.0]]))


@pytest.mark.proof("reductions", "grpo_per_turn")
@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_one_turn_is_grpo(by_std: bool, gamma: float):
    batch = contiguous(7, [6, 4, 5, 1, 6, 3])
    batch["index"][3:] = "other"
    arguments = batch["token_level_rewards"], batch["response_mask"], batch["index"]
    assert_close(
        compute_grpo_per_turn_advantage(*arguments, gamma=gamma, norm_adv_by_std_in_grpo=by_std),
        compute_grpo_outcome_advantage(*arguments, norm_adv_by_std_in_grpo=by_std),
    )


@pytest.mark.proof("reductions", "grpo_per_turn")
def test_a_reward_at_the_end_reaches_every_turn_as_grpo():
    # γ = 1 and as many turns in each row: the outcome is every turn's return.
    mask = tensor([[1, 1, 0, 1, 0, 1, 1]] * 4)
    rewards = torch.zeros(4, 7)
    rewards[:, -1] = tensor([1.0, 0.0, 0.0, 1.0])
    index = list("aabb")
    assert_close(
        compute_grpo_per_turn_advantage(rewards, mask, index, gamma=1.0),
        compute_grpo_outcome_advantage(rewards, mask, index),
    )


def test_an_early_turn_is_not_paid_for_its_own_past():
    # A reward of the first turn moves the first turn's advantage alone.
    mask, index = tensor([[1, 0, 1]] * 3), ["p"] * 3
    rewards = tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 2.0], [0.0, 0.0, 4.0]])
    more = rewards.clone()
    more[0, 0] = 3.0
    plain, _ = compute_grpo_per_turn_advantage(rewards, mask, index, gamma=0.9)
    moved, _ = compute_grpo_per_turn_advantage(more, mask, index, gamma=0.9)
    assert_close(plain[:, 2], moved[:, 2])
    assert moved[0, 0] > plain[0, 0]
