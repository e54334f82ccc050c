"""Settings of policy losses, and of the entropy's target: what is refused, what is advised against."""

from __future__ import annotations

import logging

import pytest

from tests.trainer.config.support import Run, only
from verl.algorithms import (
    LOSS_AGG_MODES,
    get_policy_loss_fn,
    policy_loss_info,
    policy_loss_names,
    register_policy_loss,
)

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "prompt-mean"])
def test_luspo_does_not_divide_by_lengths(run: Run, mode: str):
    message = only(run.refusal({f"{ACTOR}.policy_loss.loss_mode": "luspo", f"{ACTOR}.loss_agg_mode": mode}))
    assert f"{ACTOR}.loss_agg_mode={mode}: policy_loss.loss_mode=luspo makes no sense with it" in message
    assert "token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm" in message
    assert "the paper's is seq-mean-token-sum" in message


@pytest.mark.parametrize("name", ["gspo", "sapo", "geo_mean"])
def test_another_aggregation_than_the_papers_is_said(run: Run, name: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "verl"):
        assert run.load({f"{ACTOR}.policy_loss.loss_mode": name})
    assert f"the paper of policy_loss.loss_mode={name}" in caplog.text
    assert "set loss_agg_mode=seq-mean-token-mean" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "verl"):
        assert run.load({f"{ACTOR}.policy_loss.loss_mode": name, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"})
    assert "the paper of" not in caplog.text


def test_dro_needs_its_beta(run: Run):
    message = only(run.refusal({f"{ACTOR}.policy_loss.loss_mode": "dro"}))
    assert f"{ACTOR}.policy_loss.dro_beta=null" in message
    assert run.load({f"{ACTOR}.policy_loss.loss_mode": "dro", f"{ACTOR}.policy_loss.dro_beta": 0.1})
    message = run.refusal({f"{ACTOR}.policy_loss.loss_mode": "cfpo", f"{ACTOR}.clip_ratio_low": 0.0})
    assert f"{ACTOR}.clip_ratio_low=0.0: policy_loss.loss_mode=cfpo divides by it" in message
    assert "clip_ratio_high" not in message


def test_bounds_of_clip_cov(run: Run):
    own = {f"{ACTOR}.policy_loss.loss_mode": "clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb": 6.0}
    assert "no covariance lies between it and policy_loss.clip_cov_ub=5.0" in only(run.refusal(own))


def test_tokens_cannot_leave_a_loss_without_weights(run: Run):
    @register_policy_loss("no_weights")
    def no_weights(log_prob, advantages, response_mask): ...

    for key, value in (("top_entropy_quantile", 0.2), ("off_policy_mask_threshold", 0.1)):
        own = {f"{ACTOR}.policy_loss.loss_mode": "no_weights", f"{ACTOR}.policy_loss.{key}": value}
        assert "no_weights has no parameter rollout_is_weights" in only(run.refusal(own))


def test_a_divergence_is_corrected_once(run: Run):
    corrected = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.use_bias_correction_kl": True}
    assert run.load(corrected | {f"{ACTOR}.kl_loss_type": "k3"})
    message = only(run.refusal(corrected | {f"{ACTOR}.kl_loss_type": "k3+"}))
    assert f"{ACTOR}.kl_loss_type=k3+: with use_bias_correction_kl the gradient is that of the" in message


@pytest.mark.parametrize("quantile", [0.0, 1.1])
def test_the_quantile_is_a_fraction(run: Run, quantile: float):
    assert "top_entropy_quantile" in run.refusal({f"{ACTOR}.policy_loss.top_entropy_quantile": quantile})


def test_entropy_bounds(run: Run):
    target = {f"{ACTOR}.entropy_target": 0.2}
    assert run.load(target)
    swapped = target | {f"{ACTOR}.entropy_coeff_min": 0.2, f"{ACTOR}.entropy_coeff_max": 0.1}
    assert "entropy_coeff_min=0.2: it is above entropy_coeff_max=0.1" in only(run.refusal(swapped))
    outside = target | {f"{ACTOR}.entropy_coeff": 2.0}
    assert "kept between entropy_coeff_min=0.0 and entropy_coeff_max=1.0" in only(run.refusal(outside))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_every_aggregation_can_be_set(run: Run, mode: str):
    assert run.load({f"{ACTOR}.loss_agg_mode": mode}).actor_rollout_ref.actor.loss_agg_mode == mode


def test_every_loss_has_its_paper():
    ours = [name for name in policy_loss_names() if get_policy_loss_fn(name).__module__.startswith("verl.")]
    for name in ours:
        assert policy_loss_info(name).paper.startswith("https://arxiv.org/abs/")
