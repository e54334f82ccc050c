"""The policy loss of bypass mode, in which the rollout engine's log-probs are used as the old ones."""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.loss_registry import LossTerms, register_policy_loss
from verl.algorithms.policy_losses.token import vanilla
from verl.algorithms.rollout_correction import (
    accepted,
    gap_metrics,
    importance_ratio,
    importance_weights,
    log_ratio_of,
    parse_criteria,
    parse_is_threshold,
    ratio_metrics,
)
from verl.config.rollout_correction import RolloutCorrectionConfig
from verl.errors import ConfigError
from verl.utils.torch_functional import zero_masked


@register_policy_loss("bypass_mode", paper="https://arxiv.org/abs/1707.06347", returns_terms=True)
def bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    rollout_correction: RolloutCorrectionConfig | None,
) -> LossTerms:
    """A loss on the ratio of the policy being updated, π_θ, to the distribution that was sampled from, μ.

        ppo_clip     l = s · the clipped surrogate of PPO with r = π_θ / μ
        reinforce    l = -s · sg[w] · A · log π_θ                      w = 1 without rollout_is

    w is the bounded weight of :func:`importance_weights`; s is 1 where ``rollout_rs`` accepts, else 0. Both compare the
    current π_θ with μ, so they change from one mini-batch to the next. ``ppo_clip`` has no w.

    Rejected tokens have loss and gradient 0 but stay in the denominators, which are counted before any weight is known:
    rejecting half of the tokens halves the loss. (The decoupled mode, which sees the whole batch first, divides by the
    accepted tokens.)

    ``old_log_prob`` is the rollout's, log μ. Further metrics: ``rollout_corr/{kl,k3_kl,chi2_token}``;
    ``rollout_corr/rollout_is_{mean,max,min,ratio_fraction_high,ratio_fraction_low}`` of the ratio (reinforce with
    rollout_is); ``rollout_corr/rollout_rs_masked_fraction`` (rollout_rs).

    Raises:
        ConfigError: the settings of the correction are missing or invalid.
    """
    if (settings := rollout_correction) is None:
        raise ConfigError(
            "the policy loss bypass_mode needs the settings of the correction: pass rollout_correction=..., or set "
            "policy_loss.rollout_correction of its config (in a run, rollout_correction.bypass_mode=true does so)."
        )
    if settings.rollout_is_batch_normalize:
        raise ConfigError(
            "rollout_is_batch_normalize=true cannot be used in the policy loss bypass_mode: it sees one micro-batch "
            "at a time, so the mean weight would depend on the layout. Set it to false, or bypass_mode=false, which "
            "normalises over the batch of the step."
        )
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    metrics = {"actor/ppo_kl": -log_ratio, **gap_metrics(log_ratio)}
    if settings.loss_type == "ppo_clip":
        terms = vanilla(old_log_prob, log_prob, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    else:
        terms = LossTerms(-advantages * log_prob)
        if settings.rollout_is is not None:
            band = parse_is_threshold(settings.rollout_is_threshold)
            ratio = importance_ratio(log_ratio, response_mask, settings.rollout_is)
            terms = LossTerms(terms.losses * importance_weights(ratio, band).to(terms.losses.dtype))
            metrics |= ratio_metrics(ratio, band)
    losses = terms.losses
    if settings.rollout_rs is not None:
        is_accepted = accepted(
            log_ratio, response_mask, parse_criteria(settings.rollout_rs, settings.rollout_rs_threshold)
        )
        losses = zero_masked(losses, is_accepted)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = (~is_accepted).double()
    return LossTerms(losses, terms.is_clipped, terms.is_clipped_lower, metrics)
