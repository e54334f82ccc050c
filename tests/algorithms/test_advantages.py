"""Advantage estimators: numbers by hand, slow oracles, reductions of one to another, edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from tests.support.estimators import SETTINGS, random_batch
from tests.support.estimators import whiten as slow_whiten
from verl.algorithms import (
    compute_advantages,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
)


def whiten(values: list, mask: torch.Tensor) -> torch.Tensor:
    return torch.tensor(slow_whiten(values, mask.tolist()), dtype=torch.float64)


# ---- gae ----------------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "gae")
def test_gae_by_hand():
    # γ=0.5 λ=0.5, one response of 3 tokens: r = 0 0 1, V = 1 2 3
    # δ₂ = 1 - 3 = -2        δ₁ = 0 + 0.5·3 - 2 = -0.5      δ₀ = 0 + 0.5·2 - 1 = 0
    # A₂ = -2   A₁ = -0.5 + 0.25·(-2) = -1   A₀ = 0 + 0.25·(-1) = -0.25
    advantages, returns = compute_gae_advantage_return(
        tensor([[0.0, 0.0, 1.0]]), tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3), gamma=0.5, lam=0.5
    )
    assert_close(returns, tensor([[0.75, 1.0, 1.0]]))
    # mean -13/12, variance ((10/12)² + (1/12)² + (11/12)²)/2 = 222/288
    expected = (tensor([[-0.25, -1.0, -2.0]]) + 13 / 12) / math.sqrt(222 / 288 + 1e-8)
    assert_close(advantages, expected)


@pytest.mark.proof("masks", "gae")
def test_gae_skips_tool_tokens():
    # The same three tokens with a tool's output between: nothing changes for them.
    _, returns = compute_gae_advantage_return(
        tensor([[0.0, 7.0, 0.0, 1.0, 7.0]]),
        tensor([[1.0, 7.0, 2.0, 3.0, 7.0]]),
        tensor([[1, 0, 1, 1, 0]]),
        gamma=0.5,
        lam=0.5,
    )
    assert_close(returns, tensor([[0.75, 0.0, 1.0, 1.0, 0.0]]))


def slow_gae(r: list, v: list, m: list, gamma: float, lam: float) -> list[float]:
    """One row: walk the valid tokens backwards."""
    advantages, after, next_value = [0.0] * len(r), 0.0, 0.0
    for t in reversed([t for t in range(len(r)) if m[t]]):
        after = r[t] + gamma * next_value - v[t] + gamma * lam * after
        advantages[t], next_value = after, v[t]
    return advantages


@pytest.mark.proof("oracle", "gae")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), gamma=st.floats(0, 1), lam=st.floats(0, 1), density=st.floats(0, 1))
def test_gae_against_the_slow_form(seed: int, gamma: float, lam: float, density: float):
    batch = random_batch(seed, density=density)
    r, v, m = (batch[k] for k in ("token_level_rewards", "values", "response_mask"))
    expected = [slow_gae(*row, gamma, lam) for row in zip(r.tolist(), v.tolist(), m.tolist(), strict=True)]
    advantages, returns = compute_gae_advantage_return(r, v, m, gamma, lam)
    assert_close(returns.double(), torch.tensor(expected, dtype=torch.float64) + v.double(), rtol=1e-4, atol=1e-5)
    assert_close(advantages.double(), whiten(expected, m), rtol=1e-3, atol=1e-3)


@pytest.mark.proof("reductions", "gae", "remax")
def test_gae_with_lambda_and_gamma_one_is_monte_carlo_minus_v():
    batch = random_batch(3)
    r, v, m = (batch[k] for k in ("token_level_rewards", "values", "response_mask"))
    _, returns = compute_gae_advantage_return(r, v, m, gamma=1.0, lam=1.0)
    _, to_go = compute_remax_outcome_advantage(r, torch.zeros(len(r)), m)
    assert_close(returns, to_go)


@pytest.mark.proof("reductions", "gae")
def test_gae_with_lambda_zero_is_one_step():
    _, returns = compute_gae_advantage_return(
        tensor([[0.0, 1.0]]), tensor([[5.0, 3.0]]), torch.ones(1, 2), gamma=0.5, lam=0.0
    )
    assert_close(returns, tensor([[1.5, 1.0]]))  # r₀ + γ V₁, r₁


# ---- group estimators ----------------------------------------------------------------------------


@pytest.mark.proof("by hand", "grpo", "grpo_vectorized")
def test_grpo_by_hand():
    # Group a: R = 1, 3: mean 2, unbiased deviation √2. Group b alone: its own reward.
    rewards = tensor([[0.0, 1.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    mask = tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, np.array(["a", "b", "a"], dtype=object))
    a = 1 / (math.sqrt(2) + 1e-6)
    expected = tensor([[-a, -a, 0.0], [5 / (1 + 1e-6), 0.0, 0.0], [a, a, a]])
    assert_close(advantages, expected)
    assert_close(returns, expected)
    assert advantages.data_ptr() != returns.data_ptr()


@pytest.mark.proof("by hand", "grpo", "grpo_vectorized")
def test_grpo_without_std_by_hand():
    rewards, mask = tensor([[1.0], [5.0], [3.0]]), torch.ones(3, 1)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "b", "a"], norm_adv_by_std_in_grpo=False)
    assert_close(advantages, tensor([[-1.0], [5.0], [1.0]]))


@pytest.mark.proof("by hand", "rloo", "rloo_vectorized")
def test_rloo_by_hand():
    # Group of three, R = 1, 2, 6: each against the mean of the other two: 4, 3.5, 1.5. One alone: raw.
    rewards, mask = tensor([[1.0], [2.0], [7.0], [6.0]]), torch.ones(4, 1)
    advantages, _ = compute_rloo_outcome_advantage(rewards, mask, ["a", "a", "b", "a"])
    assert_close(advantages, tensor([[-3.0], [-1.5], [7.0], [4.5]]))


def slow_group(scores: list[float], index: list, kind: str) -> list[float]:
    out = []
    for i, score in enumerate(scores):
        group = [s for s, g in zip(scores, index, strict=True) if g == index[i]]
        n, mean = len(group), sum(group) / len(group)
        std = math.sqrt(sum((s - mean) ** 2 for s in group) / (n - 1)) if n > 1 else 1.0
        if n == 1:
            mean = 0.0
        others = (sum(group) - score) / (n - 1) if n > 1 else 0.0
        out.append({"grpo": (score - mean) / (std + 1e-6), "dr": score - mean, "rloo": score - others}[kind])
    return out


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["grpo", "dr", "rloo"]),
)
def test_group_estimators_against_the_slow_form(groups: list[int], seed: int, kind: str):
    batch = random_batch(seed, groups)
    r, m = batch["token_level_rewards"], batch["response_mask"]
    if kind == "rloo":
        advantages, _ = compute_rloo_outcome_advantage(r, m, groups)
    else:
        advantages, _ = compute_grpo_outcome_advantage(r, m, groups, norm_adv_by_std_in_grpo=kind == "grpo")
    expected = slow_group(r.double().sum(-1).tolist(), groups, kind)
    assert_close(advantages.double(), torch.tensor(expected).unsqueeze(-1).double() * m, rtol=1e-3, atol=1e-4)


@pytest.mark.proof("reductions", "rloo", "rloo_vectorized")
def test_rloo_of_two_is_twice_grpo_without_std():
    r, m, index = torch.randn(6, 1), torch.ones(6, 1), [0, 0, 1, 1, 2, 2]
    rloo, _ = compute_rloo_outcome_advantage(r, m, index)
    plain, _ = compute_grpo_outcome_advantage(r, m, index, norm_adv_by_std_in_grpo=False)
    assert_close(rloo, 2 * plain)
    assert_close(rloo[0], r[0] - r[1])


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_constant_added_to_a_group_changes_nothing(name: str):
    batch = random_batch(7, density=1.0)
    shifted = {**batch, "token_level_rewards": batch["token_level_rewards"].clone()}
    shifted["token_level_rewards"][:3, -1] += 5.0  # the first group
    plain, moved = (compute_advantages(name, b, SETTINGS)[0] for b in (batch, shifted))
    assert_close(plain, moved, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["grpo", "dr", "rloo"])
def test_equal_scores_give_exactly_zero(kind: str):
    r, m, index = torch.full((8, 1), 0.1), torch.ones(8, 1), [0] * 3 + [1] * 5
    if kind == "rloo":
        advantages, _ = compute_rloo_outcome_advantage(r, m, index)
    else:
        advantages, _ = compute_grpo_outcome_advantage(r, m, index, norm_adv_by_std_in_grpo=kind == "grpo")
    assert (advantages == 0).all()


@pytest.mark.parametrize(
    "index",
    [["x", "y", "x"], np.array(["x", "y", "x"], dtype=object), tensor([9, 4, 9]), [("a", 1), ("b", 1), ("a", 1)]],
)
def test_group_ids_of_any_kind(index: object):
    advantages, _ = compute_rloo_outcome_advantage(tensor([[1.0], [2.0], [4.0]]), torch.ones(3, 1), index)
    assert_close(advantages, tensor([[-3.0], [2.0], [3.0]]))


# ---- reinforce++ and remax -----------------------------------------------------------------------


@pytest.mark.proof("by hand", "reinforce_plus_plus")
def test_reinforce_plus_plus_by_hand():
    # γ = 0.5, valid tokens r = 1, 2, 4 with a tool's output before the last, which G passes undiminished:
    # G₂ = 4, G₁ = 2 + 0.5·4 = 4, G₀ = 1 + 0.5·4 = 3
    rewards, mask = tensor([[1.0, 2.0, 9.0, 4.0, 9.0]]), tensor([[1, 1, 0, 1, 0]])
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert_close(returns, tensor([[3.0, 4.0, 0.0, 4.0, 0.0]]))
    assert_close(advantages, whiten([[3.0, 4.0, 0.0, 4.0, 0.0]], mask).float())


@pytest.mark.proof("reductions", "reinforce_plus_plus", "gae")
def test_reinforce_plus_plus_is_gae_without_a_critic():
    batch = random_batch(11)
    r, m = batch["token_level_rewards"], batch["response_mask"]
    mine = compute_reinforce_plus_plus_outcome_advantage(r, m, gamma=0.7)
    gae = compute_gae_advantage_return(r, torch.zeros_like(r), m, gamma=0.7, lam=1.0)
    assert_close(mine, gae)


@pytest.mark.proof("by hand", "remax")
def test_remax_by_hand():
    rewards, mask = tensor([[1.0, 0.0, 2.0], [0.0, 5.0, 9.0]]), tensor([[1, 1, 1], [1, 1, 0]])
    advantages, returns = compute_remax_outcome_advantage(rewards, tensor([1.5, -1.0]), mask)
    assert_close(returns, tensor([[3.0, 2.0, 2.0], [5.0, 5.0, 0.0]]))
    assert_close(advantages, tensor([[1.5, 0.5, 0.5], [6.0, 6.0, 0.0]]))


@pytest.mark.proof("reductions", "remax", "reinforce_plus_plus")
def test_remax_with_zero_baseline_is_the_return():
    batch = random_batch(5)
    r, m = batch["token_level_rewards"], batch["response_mask"]
    advantages, returns = compute_remax_outcome_advantage(r, torch.zeros(len(r)), m)
    assert_close(advantages, returns)
    _, undiscounted = compute_reinforce_plus_plus_outcome_advantage(r, m, gamma=1.0)
    assert_close(returns, undiscounted)
