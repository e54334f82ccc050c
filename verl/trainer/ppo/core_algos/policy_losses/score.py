"""Losses -w·A·log π with a weight w that gets no gradient: the score function, re-weighted.

Their gradient is -w·A·∇log π on every token with w > 0, also where PPO's clip would stop it. Their
value has no meaning beyond that: it moves with log π.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    "gpg",
    paper="https://arxiv.org/abs/2504.02546",
    reproduces={
        "GPG": (
            "algorithm.adv_estimator=gpg",
            "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """The plain policy gradient, without a ratio.

        l_t = -A · log π

    Paper: GPG, https://arxiv.org/abs/2504.02546. With more than one step per batch nothing
    corrects for the policy having moved.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update; read for
            ``actor/ppo_kl`` alone.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section: ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.
    """
    config = configured(config, "gpg")
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    metrics = usual_metrics(torch.zeros_like(log_ratio), log_ratio)
    return reduce_loss(-A * log_prob, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)


@register_policy_loss(
    "cispo",
    paper="https://arxiv.org/abs/2506.13585",
    reproduces={
        "CISPO with the bound of ScaleRL (arXiv:2510.13786)": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=cispo",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.clip_ratio_low=1.0",
            "actor_rollout_ref.actor.clip_ratio_high=4.0",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """Clipped importance weights: the weight is bounded, and every token keeps its gradient.

        l_t = -sg[clip(r, 1 - ε_low, 1 + ε_high)] · A · log π

    Paper: MiniMax-M1, https://arxiv.org/abs/2506.13585. It has no lower bound, which is
    ``clip_ratio_low=1``.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section: ``clip_ratio_low``, ``clip_ratio_high``, ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.

    Returns:
        the loss, and metrics; ``actor/pg_clipfrac`` counts weights cut above, ``..._lower`` below.
    """
    config = configured(config, "cispo")
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_ratio_of(log_prob, old_log_prob).detach()
    ratio = log_ratio.exp()
    low, high = 1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high
    loss_mat = -ratio.clamp(low, high) * A * log_prob
    metrics = usual_metrics(ratio > high, log_ratio, ratio < low)
    return reduce_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)


def total_variation(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """|π - π_old| of the sampled token: the total variation of "this token, or another"."""
    return (log_prob.exp() - old_log_prob.exp()).abs()


def binary_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """KL(π_old ‖ π) of "this token, or another", in nats.

    π_old·log(π_old / π) + (1 - π_old)·log((1 - π_old) / (1 - π))
    """
    tiny = torch.finfo(log_prob.dtype).tiny
    other, old_other = -torch.expm1(log_prob), -torch.expm1(old_log_prob)  # 1 - π, precise also near 1
    change = old_other.clamp(min=tiny).log() - other.clamp(min=tiny).log()
    return old_log_prob.exp() * (old_log_prob - log_prob) + old_other * change


def _dppo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None,
    divergence: Callable[[Tensor, Tensor], Tensor],
) -> PolicyLossResult:
    """The loss that both kinds of DPPO share, given ``divergence(log_prob, old_log_prob)``."""
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_ratio_of(log_prob, old_log_prob).detach()
    bound = torch.where(A > 0, config.clip_ratio_high, torch.full_like(A, config.clip_ratio_low))
    is_far = divergence(log_prob.detach(), old_log_prob) > bound
    is_outward = ((A > 0) & (log_ratio > 0)) | ((A < 0) & (log_ratio < 0))
    is_stopped = is_far & is_outward
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=config.clip_ratio_c) * ~is_stopped
    metrics = usual_metrics(is_stopped, log_ratio, ratio > config.clip_ratio_c)
    return reduce_loss(-weight * A * log_prob, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)


@register_policy_loss("dppo_tv", paper="https://arxiv.org/abs/2602.04879")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """Divergence PPO with the total variation: the trust region is one of probabilities, not of ratios.

        l_t = -sg[M · min(r, c)] · A · log π
        M   = 0 where |π - π_old| > δ and the step would lead further away
              (A > 0 and π > π_old, or A < 0 and π < π_old), else 1

    A rare token may then double its probability, and a frequent one may not fall by more than δ;
    PPO's ratio has it the other way round. δ is ``clip_ratio_high`` for A > 0 and ``clip_ratio_low``
    for A < 0; c, ``clip_ratio_c``, truncates the importance weight (the paper's is far above PPO's
    dual clip; 20 is usual). π and π_old are those of the sampled token, exp of its log-probs.

    Paper: https://arxiv.org/abs/2602.04879 (binary total variation).

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section: ``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c``,
            ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.

    Returns:
        the loss, and metrics; ``actor/pg_clipfrac`` counts tokens with M = 0, ``..._lower`` those
        with a ratio above c.
    """
    config = configured(config, "dppo_tv")
    return _dppo(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, total_variation
    )


@register_policy_loss("dppo_kl", paper="https://arxiv.org/abs/2602.04879")
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """Divergence PPO with the KL of "this token, or another" in place of the distance.

        l_t = -sg[M · min(r, c)] · A · log π
        M   = 0 where D > δ and the step would lead further away, else 1
        D   = π_old·log(π_old / π) + (1 - π_old)·log((1 - π_old) / (1 - π))

    All else is as in ``dppo_tv``; the bounds are nats. It is stricter where a probability is close
    to 0 or 1.

    Paper: https://arxiv.org/abs/2602.04879 (binary KL).

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section, as for dppo_tv.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.
    """
    config = configured(config, "dppo_kl")
    return _dppo(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, binary_kl
    )
