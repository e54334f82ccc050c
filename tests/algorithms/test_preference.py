"""Losses on pairs: worked by hand, against slow oracles, and the laws that they obey."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from verl.algorithms.preference import (
    Pairs,
    bradley_terry_loss,
    direct_preference_loss,
    implicit_rewards,
    reward_centering,
    sequence_log_probs,
    split_pairs,
)

LOG_2 = math.log(2)
LOSSES = ("sigmoid", "hinge", "ipo")
numbers = st.floats(-20, 20)
betas = st.floats(0.01, 2)


def pair(chosen: float, rejected: float) -> Pairs:
    return Pairs(torch.tensor([chosen], dtype=torch.float64), torch.tensor([rejected], dtype=torch.float64))


def slow(loss_type: str, z: float, beta: float, smoothing: float) -> float:
    """By the definitions, one number at a time."""
    if loss_type == "sigmoid":
        right, wrong = 1 / (1 + math.exp(-z)), 1 / (1 + math.exp(z))
        return -(1 - smoothing) * math.log(right) - smoothing * math.log(wrong)
    if loss_type == "hinge":
        return max(0.0, 1 - z)
    return (z / beta - 1 / (2 * beta)) ** 2


@pytest.mark.proof("by hand", "sigmoid")
def test_bradley_terry_by_hand():
    rewards = Pairs(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0.0, 1.0, 1.0]))
    # z = 1, -2, 0: log(1 + e^-1), log(1 + e^2), log 2
    assert_close(bradley_terry_loss(rewards), torch.tensor([0.31326169, 2.12692801, 0.69314718]))
    # the margin moves z to 0.5, -2.5, -0.5
    assert_close(bradley_terry_loss(rewards, margin=0.5), torch.tensor([0.47407698, 2.57888973, 0.97407698]))
    # 0.9 · l(z) + 0.1 · l(-z), where l(-z) = l(z) + z: l(z) + 0.1 z
    smooth = bradley_terry_loss(rewards, label_smoothing=0.1)
    assert_close(smooth, torch.tensor([0.31326169 + 0.1, 2.12692801 - 0.2, 0.69314718]))


def test_extreme_rewards_keep_finite_losses_and_gradients():
    rewards = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = bradley_terry_loss(Pairs(rewards, torch.zeros(2)))
    assert_close(loss, torch.tensor([0.0, 1e4]))  # -log σ(z) → -z
    loss.sum().backward()
    assert rewards.grad.tolist() == [0.0, -1.0]


def test_centering_by_hand():
    rewards = Pairs(torch.tensor([2.0, 1.0, 3.0]), torch.tensor([1.0, -1.0, -1.0]))
    assert reward_centering(rewards).tolist() == [9.0, 0.0, 4.0]  # 3², 0², 2²


@pytest.mark.proof("by hand", *LOSSES)
def test_dpo_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0, 9.0], [-2.0, 9.0, 9.0]])
    reference = torch.tensor([[-1.5, -2.5, 7.0], [-1.0, 7.0, 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    policy, ref = sequence_log_probs(log_probs, mask), sequence_log_probs(reference, mask)
    assert policy.tolist() == [-3.0, -2.0]
    # log-ratios -3 + 4 = 1 and -2 + 1 = -1
    rewards = split_pairs(implicit_rewards(policy, ref, beta=0.1))
    assert_close(torch.cat(rewards), torch.tensor([0.1, -0.1]))
    assert_close(direct_preference_loss(rewards, 0.1), torch.tensor([0.59813887]))  # log(1 + e^-0.2)
    assert_close(direct_preference_loss(rewards, 0.1, "hinge"), torch.tensor([0.8]))  # 1 - 0.2
    assert_close(direct_preference_loss(rewards, 0.1, "ipo"), torch.tensor([9.0]))  # (2 - 5)²


@pytest.mark.proof("by hand", "sigmoid")
def test_simpo_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0, 0.0], [-4.0, -4.0, -4.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    mean = sequence_log_probs(log_probs, mask, average=True)
    assert mean.tolist() == [-1.5, -4.0]
    rewards = split_pairs(implicit_rewards(mean, None, beta=2.0))
    # β (-1.5 + 4) - γ = 5 - 0.5 = 4.5: log(1 + e^-4.5)
    assert_close(direct_preference_loss(rewards, 2.0, margin=0.5), torch.tensor([0.01104774]))


@pytest.mark.proof("oracle", *LOSSES)
@given(numbers, numbers, betas, st.floats(0, 0.5), st.floats(0, 2), st.sampled_from(LOSSES))
def test_losses_are_their_definitions(chosen, rejected, beta, smoothing, margin, loss_type):
    smoothing = smoothing if loss_type == "sigmoid" else 0.0
    found = direct_preference_loss(pair(chosen, rejected), beta, loss_type, margin, smoothing).item()
    assert found == pytest.approx(slow(loss_type, chosen - rejected - margin, beta, smoothing), rel=1e-9, abs=1e-12)


@pytest.mark.proof("reductions", "sigmoid")
@given(numbers, st.floats(0, 0.5))
def test_equal_rewards_cost_log_2(reward, smoothing):
    assert bradley_terry_loss(pair(reward, reward), label_smoothing=smoothing).item() == pytest.approx(LOG_2)


@pytest.mark.proof("reductions", "sigmoid")
@given(numbers, numbers, st.floats(0, 0.5))
def test_a_swapped_pair_differs_by_the_difference_of_rewards(a, b, smoothing):
    # -log σ(z) + log σ(-z) = -z, and smoothing takes 2ε of it away: nothing is left at ε = ½
    gap = bradley_terry_loss(pair(a, b), 0.0, smoothing) - bradley_terry_loss(pair(b, a), 0.0, smoothing)
    assert gap.item() == pytest.approx(-(a - b) * (1 - 2 * smoothing), abs=1e-9)


@pytest.mark.proof("reductions", *LOSSES)
@given(numbers, numbers, numbers)
def test_only_differences_of_rewards_count(a, b, shift):
    for loss_type in LOSSES:
        moved = direct_preference_loss(pair(a + shift, b + shift), 0.5, loss_type)
        assert_close(moved, direct_preference_loss(pair(a, b), 0.5, loss_type), atol=1e-9, rtol=1e-9)


@pytest.mark.proof("reductions", "ipo")
@given(betas)
def test_ipo_rests_where_the_log_ratios_are_half_of_one_over_beta_apart(beta):
    ratio = torch.tensor([1 / (2 * beta) + 0.3], dtype=torch.float64, requires_grad=True)
    rewards = Pairs(implicit_rewards(ratio, None, beta), torch.tensor([0.3 * beta], dtype=torch.float64))
    loss = direct_preference_loss(rewards, beta, "ipo")
    loss.sum().backward()
    assert loss.item() == pytest.approx(0, abs=1e-18)
    assert ratio.grad.item() == pytest.approx(0, abs=1e-9)


@pytest.mark.proof("reductions", "sigmoid")
def test_a_vanishing_beta_leaves_half_the_difference_of_log_probs():
    policy = torch.tensor([-3.0, -5.0], dtype=torch.float64, requires_grad=True)
    for beta in (1e-3, 1e-6):
        loss = direct_preference_loss(split_pairs(implicit_rewards(policy, policy * 2, beta)), beta)
        (slope,) = torch.autograd.grad(loss.sum(), policy)
        assert loss.item() == pytest.approx(LOG_2, abs=2 * beta)
        assert (slope / beta).tolist() == pytest.approx([-0.5, 0.5], abs=2 * beta)


@pytest.mark.proof("gradient", param="loss_type")
@pytest.mark.proof("masks", param="loss_type")
@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradients_against_finite_differences(loss_type):
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(8, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(8, 5, generator=generator) < 0.7
    smoothing = 0.2 if loss_type == "sigmoid" else 0.0

    def total(x):
        rewards = implicit_rewards(sequence_log_probs(x, mask), sequence_log_probs(reference, mask), 0.3)
        return direct_preference_loss(split_pairs(rewards), 0.3, loss_type, 0.1, smoothing)

    assert torch.autograd.gradcheck(total, log_probs)
    (grad,) = torch.autograd.grad(total(log_probs).sum(), log_probs)
    assert grad[~mask].eq(0).all()
    # only differences within a pair count: the two sides are pushed apart by equal forces
    tokens = split_pairs(torch.where(mask, grad, torch.nan).nanmean(-1))
    assert_close(tokens.chosen, -tokens.rejected)
    assert (tokens.chosen <= 1e-12).all() or loss_type == "ipo"


def test_the_reference_gets_no_gradient():
    reference = torch.zeros(2, requires_grad=True)
    policy = torch.ones(2, requires_grad=True)
    implicit_rewards(policy, reference, 0.1).sum().backward()
    assert reference.grad is None
    assert policy.grad.tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.proof("masks", *LOSSES)
def test_what_lies_under_the_mask_is_never_read():
    log_probs = torch.tensor([[-1.0, math.nan], [-math.inf, -2.0], [math.nan, math.nan]])
    mask = torch.tensor([[1, 0], [0, 1], [0, 0]])
    for average in (False, True):
        assert sequence_log_probs(log_probs, mask, average).tolist() == [-1.0, -2.0, 0.0]


def test_rows_alternate_and_come_in_pairs():
    pairs = split_pairs(torch.arange(6))
    assert (pairs.chosen.tolist(), pairs.rejected.tolist()) == ([0, 2, 4], [1, 3, 5])
    with pytest.raises(ValueError, match="3 rows are no pairs"):
        split_pairs(torch.arange(3))
