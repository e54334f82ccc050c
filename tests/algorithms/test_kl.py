"""KL estimators, the reward that pays for it, the controllers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from verl.algorithms import (
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_in_reward,
    kl_penalty,
)
from verl.algorithms.kl import KL_KINDS
from verl.errors import ConfigError
from verl.trainer.config import KLControlConfig

K3 = [math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1]
BY_HAND = {  # Δ = 0.5, -0.5
    "kl": [0.5, -0.5],
    "k1": [0.5, -0.5],
    "abs": [0.5, 0.5],
    "mse": [0.125, 0.125],
    "k2": [0.125, 0.125],
    "low_var_kl": K3,
    "k3": K3,
}


@pytest.mark.proof("by hand", param="kind")
@pytest.mark.parametrize("kind", KL_KINDS)
def test_by_hand(kind: str):
    log_prob, ref = tensor([-1.0, -1.5]), tensor([-1.5, -1.0])
    assert_close(kl_penalty(log_prob, ref, kind), tensor(BY_HAND[kind.removesuffix("+")]))


@pytest.mark.proof("gradient", param="kind")
@pytest.mark.parametrize("kind", KL_KINDS)
def test_gradient_against_finite_differences(kind: str):
    log_prob = tensor([-1.0, -1.5, -0.3], dtype=torch.float64, requires_grad=True)
    ref = tensor([-1.5, -1.0, -0.2], dtype=torch.float64)
    kl_penalty(log_prob, ref, kind).sum().backward()
    value, step = ("k2" if kind.endswith("+") else kind), 1e-6  # + has the gradient of k2, whatever its value
    above, below = (kl_penalty(log_prob.detach() + d, ref, value) for d in (step, -step))
    assert_close(log_prob.grad, (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


def test_plain_gradients():
    ref = tensor([-1.5])
    for kind, expected in (("k1", 1.0), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))):
        log_prob = tensor([-1.0], requires_grad=True)
        kl_penalty(log_prob, ref, kind).backward()
        assert_close(log_prob.grad, tensor([expected]))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_over_the_policy_is_the_kl(kind: str):
    # Exact expectation over a vocabulary of 5: Σ_v π(v) k(v) = KL(π ‖ π_ref).
    generator = torch.Generator().manual_seed(0)
    policy, ref = (0.5 * torch.randn(2, 5, generator=generator, dtype=torch.float64)).log_softmax(-1)
    exact = (policy.exp() * (policy - ref)).sum()
    assert_close((policy.exp() * kl_penalty(policy, ref, kind)).sum(), exact)


def test_plus_gives_the_gradient_of_the_kl_in_expectation():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    exact = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits)[0]
    policy = logits.log_softmax(-1)
    sampled = torch.autograd.grad((policy.exp().detach() * kl_penalty(policy, ref, "k1+")).sum(), logits)[0]
    assert_close(sampled, exact)
    policy = logits.log_softmax(-1)
    plain = torch.autograd.grad((policy.exp().detach() * kl_penalty(policy, ref, "k1")).sum(), logits)[0]
    assert_close(plain, torch.zeros(5, dtype=torch.float64))


def test_k3_is_bounded_and_keeps_finite_gradients():
    log_prob = tensor([-1000.0, 0.0], requires_grad=True)
    value = kl_penalty(log_prob, tensor([0.0, -1000.0]), "k3")
    assert_close(value, tensor([10.0, 10.0]))
    value.sum().backward()
    assert torch.isfinite(log_prob.grad).all()


def test_unknown_kinds_and_full_are_refused():
    for kind in ("full", "full+"):
        with pytest.raises(ConfigError, match=r"whole vocabulary.*low_var_kl"):
            kl_penalty(tensor([0.0]), tensor([0.0]), kind)
    with pytest.raises(ConfigError, match=r"'low_var'.*Did you mean 'low_var_kl'"):
        kl_penalty(tensor([0.0]), tensor([0.0]), "low_var")


def test_kl_in_reward_by_hand():
    # Row 0: Δ = 0.5, 1.5 (mean 1). Row 1: Δ = 2 on its single token. Row 2 empty: no part of the mean KL.
    scores = tensor([[0.0, 1.0, math.nan], [3.0, math.nan, 0.0], [math.nan, 0.0, 0.0]])
    old = tensor([[-1.0, -1.0, math.nan], [-1.0, math.inf, 0.0], [0.0, 0.0, 0.0]])
    ref = tensor([[-1.5, -2.5, 0.0], [-3.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    mask = tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    rewards, mean_kl = kl_in_reward(scores, old, ref, mask, beta=0.1)
    assert_close(rewards, tensor([[-0.05, 0.85, 0.0], [2.8, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert_close(mean_kl, tensor(1.5))


def test_kl_in_reward_of_an_empty_batch_is_finite():
    rewards, mean_kl = kl_in_reward(*(torch.ones(2, 2) for _ in range(3)), torch.zeros(2, 2), beta=0.1)
    assert (rewards == 0).all()
    assert mean_kl == 0.0


def test_compute_rewards_by_hand():
    rewards = compute_rewards(tensor([[0.0, 1.0]]), tensor([[-1.0, -1.0]]), tensor([[-1.5, -0.5]]), kl_ratio=0.2)
    assert_close(rewards, tensor([[-0.1, 1.1]]))


def test_adaptive_controller_by_hand():
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=2.0, horizon=1000)
    controller.update(current_kl=2.2, n_steps=100)  # error 0.1: β·(1 + 0.1·0.1)
    assert controller.value == pytest.approx(0.101)
    controller.update(current_kl=100.0, n_steps=100)  # clipped to 0.2: β·1.02
    assert controller.value == pytest.approx(0.101 * 1.02)
    controller.update(current_kl=0.0, n_steps=500)  # clipped to -0.2: β·0.9
    assert controller.value == pytest.approx(0.101 * 1.02 * 0.9)


def test_controllers_resume():
    first = get_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=1.0, horizon=10))
    first.update(5.0, 1)
    second = get_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=1.0, horizon=10))
    second.load_state_dict(first.state_dict())
    assert second.value == first.value != 0.1

    fixed = get_kl_controller(KLControlConfig(type="fixed", kl_coef=0.3))
    assert isinstance(fixed, FixedKLController)
    fixed.update(5.0, 1)
    fixed.load_state_dict(first.state_dict())
    assert fixed.value == 0.3


def test_controller_settings_are_checked():
    with pytest.raises(ConfigError, match=r"horizon=0"):
        get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=1.0, horizon=0))
    with pytest.raises(ConfigError, match=r"'adaptiv'"):
        get_kl_controller(SimpleNamespace(type="adaptiv", kl_coef=0.1))
