"""Losses that hold the policy back smoothly instead of by a clip: a soft gate, a quadratic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.trainer.ppo.core_algos.policy_losses.common import (
    PolicyLossResult,
    configured,
    log_ratio_of,
    reduce_loss,
    usual_metrics,
    valid_only,
)
from verl.trainer.ppo.core_algos.registry import register_policy_loss


@register_policy_loss(
    "sapo",
    paper="https://arxiv.org/abs/2511.20347",
    paper_mode="seq-mean-token-mean",
    reproduces={
        "SAPO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=sapo",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            "actor_rollout_ref.actor.tau_pos=1.0",
            "actor_rollout_ref.actor.tau_neg=1.05",
        )
    },
)
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """Soft adaptive policy optimization: a gate that closes smoothly as the ratio leaves 1.

        l_t = -A · σ(τ·(r - 1)) · 4 / τ          τ = tau_pos where A > 0, else tau_neg

    On the policy itself (r = 1) its gradient is the policy gradient; away from it the gradient
    falls like the slope of the sigmoid, faster for a larger τ.

    Paper: https://arxiv.org/abs/2511.20347, whose aggregation is ``seq-mean-token-mean``.
    Releases of verl ignore ``loss_agg_mode`` here and always take that; ours is what the setting
    says. Nothing is clipped, so both clip fractions are 0.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section: ``tau_pos``, ``tau_neg``, ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.
    """
    config = configured(config, "sapo")
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    tau = torch.where(A > 0, config.tau_pos, torch.full_like(A, config.tau_neg))
    loss_mat = -A * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * 4.0 / tau
    metrics = usual_metrics(torch.zeros_like(log_ratio), log_ratio)
    return reduce_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)


@register_policy_loss("dro", paper="https://arxiv.org/abs/2405.19107")
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """Direct reward optimization: the policy gradient with a quadratic leash to the old policy.

        l_t = -(A·log π - ½ β·(log π - log π_old)²)

    Its gradient vanishes where β·(log π - log π_old) = A: the policy moves by A / β and no further.

    Paper: https://arxiv.org/abs/2405.19107 (the policy's half of its objective). Nothing is
    clipped, so both clip fractions are 0; ``actor/dro_penalty`` is the mean of the quadratic term.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section: ``policy_loss.dro_beta``, ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.

    Raises:
        ConfigError: ``policy_loss.dro_beta`` is not set.
    """
    beta = configured(config, "dro").policy_loss.dro_beta
    if beta is None:
        raise ConfigError(
            "the dro policy loss needs actor.policy_loss.dro_beta, the weight of its quadratic term. It has the unit "
            "of advantages per nat: with normalised advantages, 0.1 lets a token's log-prob move by about 10."
        )
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    difference = log_prob - old_log_prob  # not bounded: a square does not overflow, and its slope must lead back
    penalty = 0.5 * beta * difference**2
    metrics = usual_metrics(torch.zeros_like(A), log_ratio_of(log_prob, old_log_prob)) | {"actor/dro_penalty": penalty}
    return reduce_loss(penalty - A * log_prob, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)
