"""Policy losses: pure per-token maths, and the registered functions that read settings and aggregate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.trainer.ppo.core_algos.aggregate import agg_loss
from verl.trainer.ppo.core_algos.registry import register_policy_loss
from verl.utils.torch_functional import masked_mean, zero_masked

LOG_RATIO_BOUND = 20.0
"""|log π - log π_old| is cut here, so that no ratio overflows."""


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
    old_log_prob, log_prob, A = (zero_masked(x, response_mask) for x in (old_log_prob, log_prob, advantages))
    log_ratio = (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain = -A * ratio
    clipped = -A * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss_mat = torch.maximum(plain, clipped)
    bound = -A * clip_ratio_c
    is_dual_clipped = (A < 0) & (loss_mat > bound)
    loss_mat = torch.where(A < 0, torch.minimum(loss_mat, bound), loss_mat)
    return ClippedSurrogate(loss_mat, clipped > plain, is_dual_clipped, -log_ratio.detach())


@register_policy_loss("vanilla", paper="https://arxiv.org/abs/1707.06347")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss of PPO; see :func:`clipped_surrogate` for the formula.

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
    if config is None:
        raise ConfigError("the vanilla policy loss needs the actor's configuration: pass config=ActorConfig(...).")
    terms = clipped_surrogate(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )
    loss_mat = weighted(terms.loss_mat, rollout_is_weights, response_mask)
    loss = agg_loss(loss_mat, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {
        "actor/pg_clipfrac": masked_mean(terms.is_clipped.float(), response_mask),
        "actor/ppo_kl": masked_mean(terms.kl, response_mask),
        "actor/pg_clipfrac_lower": masked_mean(terms.is_dual_clipped.float(), response_mask),
    }


def weighted(loss_mat: Tensor, rollout_is_weights: Tensor | None, response_mask: Tensor) -> Tensor:
    """Per-token losses times their importance weights, which get no gradient; unchanged without weights."""
    if rollout_is_weights is None:
        return loss_mat
    return loss_mat * zero_masked(rollout_is_weights, response_mask).detach()


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
