"""The clipped surrogate of PPO."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.trainer.ppo.core_algos.aggregate import agg_loss
from verl.trainer.ppo.core_algos.policy_losses.common import (
    PolicyLossResult,
    configured,
    log_ratio_of,
    reduce_loss,
    usual_metrics,
    valid_only,
)
from verl.trainer.ppo.core_algos.registry import register_policy_loss
from verl.utils.torch_functional import masked_mean


class ClippedSurrogate(NamedTuple):
    """The PPO objective token by token; each (bsz, response_length)."""

    loss_mat: Tensor
    """The loss."""
    is_clipped: Tensor
    """The ratio left its interval in the direction that the advantage favours: no gradient."""
    is_dual_clipped: Tensor
    """A negative advantage with a ratio above the dual bound: no gradient."""
    kl: Tensor
    """log π_old - log π, the simplest estimate of how far the policy moved."""


def clipped_surrogate(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> ClippedSurrogate:
    """The clipped objective of PPO per token, with its own bound on each side and the dual clip.

        r = π / π_old = exp(clamp(log π - log π_old, ±20))
        l = max(-A·r, -A·clip(r, 1 - ε_low, 1 + ε_high))
        l = min(l, -A·c)                                     where A < 0

    Papers: PPO https://arxiv.org/abs/1707.06347 eq. 7; dual clip https://arxiv.org/abs/1912.09729
    eq. 5; separate bounds (clip-higher) DAPO https://arxiv.org/abs/2503.14476 eq. 10.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length); masked places are computed as if all inputs were 0.
        clip_ratio_low: ε_low.
        clip_ratio_high: ε_high.
        clip_ratio_c: c > 1.
    """
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    plain = -A * ratio
    clipped = -A * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss_mat = torch.maximum(plain, clipped)
    bound = -A * clip_ratio_c
    is_dual_clipped = (A < 0) & (loss_mat > bound)
    loss_mat = torch.where(A < 0, torch.minimum(loss_mat, bound), loss_mat)
    return ClippedSurrogate(loss_mat, clipped > plain, is_dual_clipped, -log_ratio.detach())


@register_policy_loss(
    "vanilla",
    paper="https://arxiv.org/abs/1707.06347",
    reproduces={
        "DAPO (arXiv:2503.14476)": (
            "algorithm.adv_estimator=grpo",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=acc",
            "data.train_batch_size=512",
            "actor_rollout_ref.rollout.n=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.clip_ratio_low=0.2",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.use_kl_loss=false",
            "data.max_response_length=20480",
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.max_resp_len=20480",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
        ),
        "Beyond the 80/20 rule (arXiv:2506.01939)": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.top_entropy_quantile=0.2",
            "actor_rollout_ref.actor.clip_ratio_low=0.2",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.use_kl_loss=false",
        ),
        "Skywork-OR1, adaptive entropy control (arXiv:2505.22312)": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.entropy_target=0.2",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.use_kl_loss=false",
        ),
    },
)
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """The clipped loss of PPO, with its own bound on each side and the dual clip.

        r = π / π_old
        l_t = max(-A·r, -A·clip(r, 1 - ε_low, 1 + ε_high))
        l_t = min(l_t, -A·c)                                 where A < 0

    Papers: PPO https://arxiv.org/abs/1707.06347 eq. 7; dual clip https://arxiv.org/abs/1912.09729 eq. 5, with
    c = ``clip_ratio_c``; separate bounds (clip-higher) DAPO https://arxiv.org/abs/2503.14476 eq. 10.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section: ``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c``,
            ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) importance weights that multiply each token's
            loss, or None.

    Returns:
        the loss, and ``actor/pg_clipfrac``, ``actor/ppo_kl``, ``actor/pg_clipfrac_lower``: means
        over the valid tokens at hand.
    """
    config = configured(config, "vanilla")
    terms = clipped_surrogate(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )
    metrics = usual_metrics(terms.is_clipped, -terms.kl, terms.is_dual_clipped)
    return reduce_loss(terms.loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The vanilla loss for callers that have no configuration object.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        cliprange: bound of both sides.
        cliprange_low: bound below, if it differs.
        cliprange_high: bound above, if it differs.
        clip_ratio_c: dual clip.
        loss_agg_mode: see :func:`agg_loss`; denominators are the counts of the tensors given.

    Returns:
        loss, clipped fraction, KL estimate, dual-clipped fraction; scalars.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    terms = clipped_surrogate(old_log_prob, log_prob, advantages, response_mask, low, high, clip_ratio_c)
    return (
        agg_loss(terms.loss_mat, response_mask, loss_agg_mode),
        masked_mean(terms.is_clipped.float(), response_mask),
        masked_mean(terms.kl, response_mask),
        masked_mean(terms.is_dual_clipped.float(), response_mask),
    )
