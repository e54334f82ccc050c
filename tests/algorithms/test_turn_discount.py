"""Discounts from turn to turn: numbers by hand, reductions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from tests.support.estimators import SETTINGS, random_batch
from verl.algorithms import (
    compute_advantages,
    compute_bi_level_gae_advantage_return,
    compute_gae_advantage_return,
    compute_grpo_per_turn_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)

# Two turns of two tokens, and a token of a tool between them: what stands there must not matter.
REWARDS = tensor([[0.0, 1.0, 9.0, 0.0, 2.0]])
VALUES = tensor([[1.0, 2.0, 9.0, 5.0, 4.0]])
MASK = tensor([[1, 1, 0, 1, 1]])


@pytest.mark.proof("by hand", "gae")
def test_gae_with_a_turn_discount_by_hand():
    # γ = 1, Γ = λ = 1/2.
    # A_4 = 2 - 4 = -2                                   A_3 = (0 + 4 - 5) + 1/2·(-2) = -2
    # A_1 = (1 + Γ·5 - 2) + Γλ·(-2) = 3/2 - 1/2 = 1      A_0 = (0 + 2 - 1) + 1/2·1 = 3/2
    _, returns = compute_gae_advantage_return(REWARDS, VALUES, MASK, gamma=1.0, lam=0.5, high_level_gamma=0.5)
    assert_close(returns, tensor([[2.5, 3.0, 0.0, 3.0, 2.0]]))  # A + V


@pytest.mark.proof("by hand", "bi_level_gae")
def test_bi_level_gae_by_hand():
    # γ = 1, Γ = λ = 1/2. The turns first, at their last tokens 4 and 1:
    # A_4 = 2 - 4 = -2      A_1 = (1 + Γ·V_4 - 2) + Γλ·A_4 = 1 - 1/2 = 1/2
    # then the tokens:  A_3 = (0 + 4 - 5) + 1/2·(-2) = -2      A_0 = (0 + 2 - 1) + 1/2·1/2 = 5/4
    advantages, returns = compute_bi_level_gae_advantage_return(
        REWARDS, VALUES, MASK, gamma=1.0, lam=0.5, high_level_gamma=0.5
    )
    assert_close(returns, tensor([[2.25, 2.5, 0.0, 3.0, 2.0]]))  # A + V
    # mean (5/4 + 1/2 - 2 - 2)/4 = -9/16; deviations 29/16, 17/16, -23/16, -23/16: variance (2188/256)/3
    scale = (2188 / 256 / 3) ** 0.5
    assert_close(advantages, tensor([[29.0, 17.0, 0.0, -23.0, -23.0]]) / 16 / scale)


@pytest.mark.proof("by hand", "reinforce_plus_plus")
def test_reinforce_plus_plus_with_a_turn_discount_by_hand():
    # γ = 1/2, Γ = 1/4: G_4 = 2, G_3 = 1, G_1 = 1 + 1/4·1 = 5/4, G_0 = 5/8
    _, returns = compute_reinforce_plus_plus_outcome_advantage(REWARDS, MASK, gamma=0.5, high_level_gamma=0.25)
    assert_close(returns, tensor([[0.625, 1.25, 0.0, 1.0, 2.0]]))


@pytest.mark.proof("by hand", "grpo_per_turn")
def test_per_turn_takes_its_discount_under_either_name():
    # R = (1, 2), alone in its group: A = G / (1 + ε) with G = (1 + 1/2·2, 2)
    expected = tensor([[2.0, 2.0, 0.0, 2.0, 2.0]])
    for names in ({"gamma": 0.5}, {"gamma": 1.0, "high_level_gamma": 0.5}):
        advantages, _ = compute_grpo_per_turn_advantage(REWARDS, MASK, ["p"], epsilon=0.0, **names)
        assert_close(advantages, expected)


def returns_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def returns(rewards: Tensor, mask: Tensor) -> Tensor:
        batch = {"token_level_rewards": rewards, "response_mask": mask, "values": torch.zeros(rewards.shape)}
        return compute_advantages(name, batch, {"gamma": 1.0, "lam": 1.0, "high_level_gamma": 0.5})[1]

    return returns


@pytest.mark.parametrize("name", ["gae", "bi_level_gae", "reinforce_plus_plus"])
@pytest.mark.proof("reductions", param="name")
def test_a_turn_counts_once_however_long_it_is(name: str):
    # An outcome of 8 at the end of three turns is worth 2, 4 and 8 in them, whatever the numbers of tokens.
    masks = [[1, 0, 1, 0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 1, 1, 1, 0, 1]]
    mask = tensor(masks)
    last = mask.shape[1] - 1 - mask.flip(-1).argmax(-1)
    rewards = torch.zeros(mask.shape).scatter(1, last.unsqueeze(-1), 8.0)
    turn = (mask.diff(dim=-1, prepend=torch.zeros(3, 1)) == 1).cumsum(-1)  # 1, 2, 3
    assert_close(returns_of(name)(rewards, mask), (2.0**turn) * mask)


@pytest.mark.parametrize("name", ["gae", "bi_level_gae", "reinforce_plus_plus", "grpo_per_turn"])
@pytest.mark.proof("reductions", param="name")
def test_without_a_discount_of_its_own_a_turn_has_that_of_tokens(name: str):
    batch = random_batch(11)
    equal = SETTINGS | {"high_level_gamma": SETTINGS["gamma"]}
    without = {key: value for key, value in SETTINGS.items() if key != "high_level_gamma"}
    assert_close(compute_advantages(name, batch, without), compute_advantages(name, batch, equal), rtol=0, atol=0)
    assert not torch.equal(compute_advantages(name, batch, without)[0], compute_advantages(name, batch, SETTINGS)[0])


@pytest.mark.proof("reductions", "bi_level_gae")
def test_bi_level_gae_of_one_turn_is_gae():
    batch = random_batch(12, density=1.1)
    assert_close(compute_advantages("bi_level_gae", batch, SETTINGS), compute_advantages("gae", batch, SETTINGS))
