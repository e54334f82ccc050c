"""The policy loss of the bypass mode: the rollout's log-probs are the old ones, and the loss corrects for itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.trainer.ppo.core_algos.aggregate import agg_loss
from verl.trainer.ppo.core_algos.policy_losses import clipped_surrogate, weighted
from verl.trainer.ppo.core_algos.registry import register_policy_loss
from verl.trainer.ppo.core_algos.rollout_correction import (
    LOG_RATIO_BOUND,
    Band,
    accepted,
    importance_ratio,
    importance_weights,
    log_ratio_of,
    parse_criteria,
    parse_is_threshold,
)
from verl.utils.torch_functional import masked_mean, zero_masked

Metrics = dict[str, Tensor]


@register_policy_loss("bypass_mode", paper="https://arxiv.org/abs/1707.06347")
def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """A loss on the ratio of the policy being updated, π_θ, to the distribution that was sampled from, μ.

        ppo_clip     l = s · the clipped surrogate of PPO with r = π_θ / μ
        reinforce    l = -s · sg[w] · A · log π_θ                      w = 1 without rollout_is

    w is the bounded weight of :func:`importance_weights`; s is 1 where ``rollout_rs`` accepts, else 0. Both are of
    π_θ as it is now against μ (so they move from one mini-batch to the next), per token or per response. They need
    nothing of other responses: the loss is the same however the mini-batch is laid out. ``ppo_clip`` has no w.

    What is rejected has loss and gradient 0, but stays in the denominators, which are counted before any weight is
    known: rejecting half of the tokens halves the loss. (The decoupled mode, which sees the whole batch first,
    divides by what is left.) All rejected is loss 0, gradient 0 and ``rollout_corr/rollout_rs_masked_fraction`` 1.

    Args:
        old_log_prob: (bsz, response_length) log μ: the rollout's.
        log_prob: (bsz, response_length) log π_θ, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section, with ``policy_loss.rollout_correction``; ``clip_ratio_low``, ``clip_ratio_high``,
            ``clip_ratio_c`` for ``ppo_clip``; ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights beside its own, or None.

    Returns:
        the loss, and means (or extremes) over the valid tokens at hand: ``actor/ppo_kl``; ``actor/pg_clipfrac``,
        ``actor/pg_clipfrac_lower`` (ppo_clip); ``rollout_corr/{kl,k3_kl,chi2_token}``;
        ``rollout_corr/rollout_is_{mean,max,min,ratio_fraction_high,ratio_fraction_low}`` of the ratio (reinforce with
        rollout_is); ``rollout_corr/rollout_rs_masked_fraction`` (rollout_rs).

    Raises:
        ConfigError: there are no settings of the correction, or they are not usable.
    """
    if config is None or (settings := config.policy_loss.rollout_correction) is None:
        raise ConfigError(
            "the policy loss bypass_mode needs the settings of the correction: set "
            "algorithm.rollout_correction.bypass_mode=true, which chooses this loss and hands them over "
            "(policy_loss.rollout_correction)."
        )
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    metrics = _gap_metrics(log_ratio, response_mask)
    if settings.loss_type == "ppo_clip":
        loss_mat, found = _clipped(old_log_prob, log_prob, advantages, response_mask, config)
    else:
        loss_mat, found = _weighted_gradient(log_ratio, log_prob, advantages, response_mask, settings)
    metrics |= found
    if settings.rollout_rs is not None:
        kept = accepted(log_ratio, response_mask, parse_criteria(settings.rollout_rs, settings.rollout_rs_threshold))
        loss_mat = zero_masked(loss_mat, kept)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = masked_mean((~kept).double(), response_mask)
    loss_mat = weighted(loss_mat, rollout_is_weights, response_mask)
    return agg_loss(loss_mat, response_mask, loss_agg_mode, **config.global_batch_info), metrics


def _clipped(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any
) -> tuple[Tensor, Metrics]:
    terms = clipped_surrogate(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )
    return terms.loss_mat, {
        "actor/pg_clipfrac": masked_mean(terms.is_clipped.float(), response_mask),
        "actor/pg_clipfrac_lower": masked_mean(terms.is_dual_clipped.float(), response_mask),
    }


def _weighted_gradient(
    log_ratio: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, settings: Any
) -> tuple[Tensor, Metrics]:
    log_prob, advantages = zero_masked(log_prob, response_mask), zero_masked(advantages, response_mask)
    loss_mat = -advantages * log_prob
    if settings.rollout_is is None:
        return loss_mat, {}
    band, level = parse_is_threshold(settings.rollout_is_threshold), settings.rollout_is
    ratio = importance_ratio(log_ratio, response_mask, level)
    weights = importance_weights(ratio, band).to(loss_mat.dtype)
    return loss_mat * weights, _ratio_metrics(ratio, response_mask, band)


def _gap_metrics(log_ratio: Tensor, response_mask: Tensor) -> Metrics:
    ratio = importance_ratio(log_ratio, response_mask, "token")
    square = (2.0 * log_ratio).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    kl = masked_mean(-log_ratio, response_mask)
    return {
        "actor/ppo_kl": kl,
        "rollout_corr/kl": kl,
        "rollout_corr/k3_kl": masked_mean(ratio - 1.0 - log_ratio, response_mask),
        "rollout_corr/chi2_token": masked_mean(square, response_mask) - 1.0,
    }


def _ratio_metrics(ratio: Tensor, response_mask: Tensor, band: Band) -> Metrics:
    lower = 1.0 / band.upper if band.lower is None else band.lower
    mask = response_mask.bool()
    return {
        "rollout_corr/rollout_is_mean": masked_mean(ratio, mask),
        "rollout_corr/rollout_is_max": ratio.masked_fill(~mask, -torch.inf).amax(),
        "rollout_corr/rollout_is_min": ratio.masked_fill(~mask, torch.inf).amin(),
        "rollout_corr/rollout_is_ratio_fraction_high": masked_mean((ratio > band.upper).double(), mask),
        "rollout_corr/rollout_is_ratio_fraction_low": masked_mean((ratio < lower).double(), mask),
    }
