"""The clipped surrogate: numbers by hand, a slow oracle, reductions, gradients, masks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from verl.algorithms import (
    LOSS_AGG_MODES,
    compute_policy_loss,
    compute_policy_loss_vanilla,
    prepare_aggregation,
)
from verl.algorithms.policy_losses.token import vanilla
from verl.errors import ConfigError
from verl.workers.config import ActorConfig


def actor(**changes: object) -> ActorConfig:
    return ActorConfig(**{"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0, **changes})


def one(ratio: float, advantage: float, **changes: float) -> float:
    """Loss of a single token with this ratio and advantage."""
    loss, _ = compute_policy_loss_vanilla(
        tensor([[0.0]]), tensor([[math.log(ratio)]]), tensor([[advantage]]), torch.ones(1, 1), config=actor(**changes)
    )
    return loss.item()


@pytest.mark.proof("by hand", "vanilla")
@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.6),  # clipped above at 1.3
        (0.5, 2.0, -1.0),  # worse than before: not clipped
        (0.5, -2.0, 1.6),  # clipped below at 0.8
        (1.5, -2.0, 3.0),  # worse than before: not clipped
        (5.0, -2.0, 6.0),  # dual clip at c = 3
        (5.0, 2.0, -2.6),  # the dual clip is for negative advantages alone
        (5.0, 0.0, 0.0),
    ],
)
def test_by_hand(ratio: float, advantage: float, expected: float):
    assert one(ratio, advantage) == pytest.approx(expected, rel=1e-5)


def test_metrics_by_hand():
    # ratios 1.5 (A=2, clipped), 0.5 (A=-2, clipped), 5 (A=-2, dual-clipped), 1 (A=1), one masked
    log_prob = tensor([[1.5, 0.5, 5.0, 1.0, 7.0]]).log()
    advantages = tensor([[2.0, -2.0, -2.0, 1.0, 2.0]])
    mask = tensor([[1, 1, 1, 1, 0]])
    _, metrics = compute_policy_loss_vanilla(torch.zeros(1, 5), log_prob, advantages, mask, config=actor())
    assert metrics["actor/pg_clipfrac"] == pytest.approx(0.5)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(0.25)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(1.5 * 0.5 * 5.0) / 4)


def slow_loss(old: list, new: list, adv: list, mask: list, low: float, high: float, c: float) -> float:
    """Token mean of the definition."""
    total, count = 0.0, 0
    for rows in zip(old, new, adv, mask, strict=True):
        for o, n, a, m in zip(*rows, strict=True):
            if not m:
                continue
            r = math.exp(max(-20.0, min(20.0, n - o)))
            loss = max(-a * r, -a * max(1 - low, min(1 + high, r)))
            total += min(loss, -a * c) if a < 0 else loss
            count += 1
    return total / max(count, 1)


def batch(seed: int, rows: int = 5, width: int = 6, spread: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, width)
    old = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    return {
        "old_log_prob": old,
        "log_prob": old + spread * torch.randn(shape, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(shape, generator=generator, dtype=torch.float64),
        "response_mask": (torch.rand(shape, generator=generator) < 0.7).long(),
    }


@pytest.mark.proof("oracle", "vanilla")
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.01, 1.0, 30.0]))
def test_against_the_slow_form(seed: int, spread: float):
    data = batch(seed, spread=spread)
    loss, _ = compute_policy_loss_vanilla(**data, config=actor())
    columns = [data[k].tolist() for k in ("old_log_prob", "log_prob", "advantages", "response_mask")]
    assert loss.item() == pytest.approx(slow_loss(*columns, 0.2, 0.3, 3.0), rel=1e-9, abs=1e-12)


def test_gradient_on_policy_is_the_policy_gradient():
    data = batch(0, spread=0.0)
    log_prob = data["log_prob"].clone().requires_grad_()
    loss, _ = compute_policy_loss_vanilla(**{**data, "log_prob": log_prob}, loss_agg_mode="token-sum", config=actor())
    loss.backward()
    assert_close(log_prob.grad, -data["advantages"] * data["response_mask"])


@pytest.mark.proof("gradient", "vanilla")
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradient_against_finite_differences(mode: str):
    data = batch(1, rows=3, width=4, spread=0.4)
    config = actor(global_batch_info=prepare_aggregation(mode, data["response_mask"], ["a", "b", "a"]))

    def loss(log_prob: torch.Tensor) -> torch.Tensor:
        return compute_policy_loss_vanilla(**{**data, "log_prob": log_prob}, loss_agg_mode=mode, config=config)[0]

    assert torch.autograd.gradcheck(loss, data["log_prob"].clone().requires_grad_())


STOPS = [(1.5, 1.0), (0.5, -1.0), (5.0, -1.0), (5.0, 1.0)]
MOVES = [(0.5, 1.0), (1.5, -1.0), (1.1, 1.0), (0.9, -1.0)]


@pytest.mark.parametrize(("ratio", "advantage", "moves"), [(*x, False) for x in STOPS] + [(*x, True) for x in MOVES])
def test_gradient_stops_exactly_where_the_clip_says(ratio: float, advantage: float, moves: bool):
    log_prob = tensor([[math.log(ratio)]], requires_grad=True)
    loss, _ = compute_policy_loss_vanilla(
        torch.zeros(1, 1), log_prob, tensor([[advantage]]), torch.ones(1, 1), config=actor()
    )
    loss.backward()
    assert (log_prob.grad.item() != 0.0) is moves
    if moves:
        assert log_prob.grad.item() == pytest.approx(-advantage * ratio)


def test_dual_clip_is_plain_clip_for_positive_advantages():
    data = batch(2)
    data["advantages"] = data["advantages"].abs()
    tight, loose = (compute_policy_loss_vanilla(**data, config=actor(clip_ratio_c=c))[0] for c in (1.01, 1e9))
    assert_close(tight, loose)


@pytest.mark.proof("reductions", "vanilla")
def test_wide_bounds_are_plain_importance_sampling():
    data = batch(3)
    loss, metrics = compute_policy_loss_vanilla(
        **data, loss_agg_mode="token-sum", config=actor(clip_ratio_low=1.0, clip_ratio_high=1e9, clip_ratio_c=1e9)
    )
    ratio = (data["log_prob"] - data["old_log_prob"]).exp()
    assert_close(loss, -(ratio * data["advantages"] * data["response_mask"]).sum())
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_importance_weights_multiply_each_token():
    data = batch(4)
    weights = torch.rand(5, 6, dtype=torch.float64)
    log_prob = data["log_prob"].clone().requires_grad_()
    weights_with_graph = weights.clone().requires_grad_()
    loss, _ = compute_policy_loss_vanilla(
        **{**data, "log_prob": log_prob},
        loss_agg_mode="token-sum",
        config=actor(),
        rollout_is_weights=weights_with_graph,
    )
    columns = {name: data[name] for name in ("old_log_prob", "log_prob", "advantages")}
    terms = vanilla(**columns, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)
    assert_close(loss, (terms.losses * weights * data["response_mask"]).sum())
    loss.backward()
    assert weights_with_graph.grad is None


@pytest.mark.proof("masks", "vanilla")
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", [("advantages",), ("log_prob",), ("old_log_prob", "log_prob", "advantages")])
def test_masked_places_are_never_read(garbage: float, columns: tuple[str, ...]):
    clean = batch(5)
    masked = clean["response_mask"] == 0
    dirty = {k: v.masked_fill(masked, garbage) if k in columns else v for k, v in clean.items()}
    log_prob = dirty["log_prob"].clone().requires_grad_()
    weights = torch.ones(5, 6, dtype=torch.float64).masked_fill(masked, garbage)
    loss, metrics = compute_policy_loss_vanilla(
        **{**dirty, "log_prob": log_prob}, config=actor(), rollout_is_weights=weights
    )
    expected, expected_metrics = compute_policy_loss_vanilla(**clean, config=actor())
    assert_close(loss, expected)
    assert_close(metrics, expected_metrics)
    loss.backward()
    assert torch.isfinite(log_prob.grad).all()
    assert (log_prob.grad[masked] == 0).all()


def test_a_ratio_cannot_overflow():
    loss, _ = compute_policy_loss_vanilla(
        tensor([[-500.0, 0.0]]), tensor([[0.0, -500.0]]), tensor([[-1.0, 1.0]]), torch.ones(1, 2), config=actor()
    )
    assert torch.isfinite(loss)


def test_form_without_configuration_is_the_same():
    data = batch(6)
    loss, metrics = compute_policy_loss_vanilla(**data, config=actor())
    plain = compute_policy_loss(**data, cliprange=0.9, cliprange_low=0.2, cliprange_high=0.3)
    assert_close(plain[0], loss)
    found = [metrics[f"actor/{key}"] for key in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")]
    assert [value.item() for value in plain[1:]] == pytest.approx(found)
    both, _ = compute_policy_loss_vanilla(**data, config=actor(clip_ratio_low=0.2, clip_ratio_high=0.2))
    assert_close(compute_policy_loss(**data, cliprange=0.2)[0], both)


def test_a_missing_configuration_is_an_error():
    with pytest.raises(ConfigError, match="config=ActorConfig"):
        compute_policy_loss_vanilla(**batch(0))


def test_configuration_may_be_any_object_with_these_fields():
    config = SimpleNamespace(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0, global_batch_info={})
    assert_close(
        compute_policy_loss_vanilla(**batch(0), config=config), compute_policy_loss_vanilla(**batch(0), config=actor())
    )
