"""What every registered policy loss must keep: masks, empty batches, weights, the policy gradient at the start."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.support.losses import PAIRS, actor, batch, evaluate
from verl.algorithms import get_policy_loss_fn, policy_loss_info, policy_loss_names
from verl.errors import ConfigError

NAMES = policy_loss_names()


@pytest.mark.proof("masks", param="name")
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_masked_places_are_never_read(name: str, mode: str, garbage: float):
    clean = batch(5)
    masked = clean["response_mask"] == 0
    dirty = {k: v if k == "response_mask" else v.masked_fill(masked, garbage) for k, v in clean.items()}
    weights = torch.rand(masked.shape, dtype=torch.float64)
    loss, metrics, gradient = evaluate(name, clean, mode, weights=weights)
    found, found_metrics, found_gradient = evaluate(name, dirty, mode, weights=weights.masked_fill(masked, garbage))
    assert_close(found, loss)
    assert_close(found_metrics, metrics)
    assert_close(found_gradient, gradient)
    assert (found_gradient[masked] == 0).all()
    assert (gradient != 0).any()


@pytest.mark.proof("edges", param="name")
@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_nothing_valid_is_a_finite_zero_with_a_graph(name: str, mode: str):
    data = batch(0) | {"response_mask": torch.zeros(6, 5, dtype=torch.int64)}
    loss, metrics, gradient = evaluate(name, data, mode)
    assert loss == 0.0
    assert (gradient == 0).all()
    assert all(torch.isfinite(v) for k, v in metrics.items() if not k.endswith(("_max", "_min")))


@pytest.mark.proof("edges", param="name")
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_response_changes_nothing_in_the_token_mean(name: str):
    data = batch(1)
    empty = data["response_mask"].sum(-1) == 0
    data["response_mask"][0] = 0
    empty[0] = True
    loss, _, gradient = evaluate(name, data, "token-mean")
    rest = {key: value[~empty] for key, value in data.items()}
    found, _, found_gradient = evaluate(name, rest, "token-mean")
    assert_close(found, loss)
    assert_close(found_gradient, gradient[~empty])


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_multiplies_the_gradient_of_its_token_and_gets_none(name: str):
    data = batch(2)
    weights = torch.rand(6, 5, dtype=torch.float64, requires_grad=True)
    _, _, gradient = evaluate(name, data)
    _, _, weighted = evaluate(name, data, weights=weights)
    assert_close(weighted, gradient * weights.detach())
    assert weights.grad is None


@pytest.mark.proof("reductions", param="name")
@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_is_the_policy_gradient(name: str):
    """On the policy itself every loss has the gradient -A, once nothing is selected by covariance."""
    data = batch(3, spread=0.0, per_row=True)
    own = {"clip_cov": {"clip_cov_ratio": 0.0}}.get(name)
    _, metrics, gradient = evaluate(name, data, config=actor(name, own))
    assert_close(gradient, -data["advantages"] * data["response_mask"])
    assert_close(metrics["actor/ppo_kl"], torch.tensor(0.0), check_dtype=False)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_the_known_ones_without_a_graph(name: str):
    loss, metrics, _ = evaluate(name, batch(4))
    assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"} <= metrics.keys()
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())
    assert loss.dim() == 0
    data = batch(4)
    valid = data["response_mask"].bool()
    expected = (data["old_log_probs"] - data["log_probs"])[valid].mean()
    assert_close(metrics["actor/ppo_kl"], expected)


SMOOTH = ["vanilla", "bypass_mode", "clip_cov", "kl_cov", "sapo", "dro", "gpg", "gspo", "luspo", "geo_mean"]
SMOOTH += ["cfpo", "m2po"]


@pytest.mark.proof("gradient", param="name")
@pytest.mark.parametrize(("name", "mode"), [pair for pair in PAIRS if pair[0] in SMOOTH])
def test_gradient_against_finite_differences(name: str, mode: str):
    """Of the value; away from the kinks, and for ratios of a response with its one advantage."""
    data = batch(1, rows=4, width=4, spread=0.4, per_row=True)
    _, _, gradient = evaluate(name, data, mode)
    step = 1e-6
    for i, j in data["response_mask"].nonzero().tolist():
        values = []
        for sign in (1, -1):
            moved = data["log_probs"].clone()
            moved[i, j] += sign * step
            values.append(evaluate(name, {**data, "log_probs": moved}, mode)[0].item())
        assert gradient[i, j].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.proof("gradient", param="name")
@pytest.mark.parametrize("name", ["gpg", "cispo", "dppo_tv", "dppo_kl", "vespo", "topr"])
def test_gradient_of_a_stopped_weight_against_finite_differences(name: str):
    """Of the value with the ratio held: all log-probs move together."""
    data = batch(1, spread=0.8)
    _, metrics, gradient = evaluate(name, data)
    assert name in ("gpg", "vespo") or metrics["actor/pg_clipfrac"] > 0
    step = 1e-6
    for i, j in data["response_mask"].nonzero().tolist():
        values = []
        for sign in (1, -1):
            moved = {key: data[key].clone() for key in ("log_probs", "old_log_probs", "rollout_log_probs")}
            for column in moved.values():
                column[i, j] += sign * step
            values.append(evaluate(name, data | moved)[0].item())
        assert gradient[i, j].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-8)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([1.0, 30.0, 1e3]))
@pytest.mark.parametrize("name", NAMES)
def test_no_ratio_overflows(name: str, seed: int, spread: float):
    data = batch(seed, spread=spread)
    loss, metrics, gradient = evaluate(
        name, {key: x.float() if x.is_floating_point() else x for key, x in data.items()}
    )
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(v) for k, v in metrics.items() if not k.endswith(("_max", "_min")))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_configuration_it_says_so(name: str):
    ones = torch.ones(1, 1)
    arguments = dict.fromkeys(("old_log_prob", "log_prob", "advantages", "response_mask"), ones)
    mode = policy_loss_info(name).paper_mode or "token-mean"
    with pytest.raises(ConfigError, match=name):
        get_policy_loss_fn(name)(**arguments, loss_agg_mode=mode, config=None, rollout_is_weights=None)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_stay_as_they_are(name: str):
    data, same = batch(6), batch(6)
    evaluate(name, data)
    for key, value in same.items():
        assert torch.equal(data[key], value)
