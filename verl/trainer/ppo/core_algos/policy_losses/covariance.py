"""Losses that treat tokens of high covariance apart, to keep the entropy of the policy up.

The covariance of a token's log-probability and its advantage, over all valid tokens of the
mini-batch, says how much a step on it lowers the entropy::

    cov_t = (log π_t - mean log π) · (A_t - mean A)

Means, the largest values and random draws are those of the whole mini-batch, so the tokens are
chosen once, before its rows are dealt to ranks and micro-batches: ``prepare`` makes the column
``cov_selected``. It reads the log-probs at the start of the update. In the first mini-batch these
are the ones that the paper reads; in later ones the paper reads the policy as it is by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.schema import require
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

PAPER = "https://arxiv.org/abs/2505.22617"


def token_covariance(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(log π - mean log π)·(A - mean A) with means over all valid tokens; (bsz, response_length) float64."""
    log_probs, A = (column.double() for column in valid_only(response_mask, log_probs.detach(), advantages))
    return (log_probs - masked_mean(log_probs, response_mask)) * (A - masked_mean(A, response_mask))


def _count(fraction: float, response_mask: Tensor) -> int:
    """How many tokens a fraction of the valid ones is: rounded down, but at least one unless it is 0."""
    return max(int(fraction * int(response_mask.bool().sum())), 1) if fraction > 0 else 0


def _selected(response_mask: Tensor, flat_positions: Tensor) -> dict[str, Tensor]:
    chosen = torch.zeros(response_mask.numel(), dtype=torch.int64, device=response_mask.device)
    chosen[flat_positions] = 1
    return {"cov_selected": chosen.view(response_mask.shape)}


def prepare_clip_cov(columns: Mapping[str, Any], config: Any, seed: int) -> dict[str, Tensor]:
    """Tokens that ``clip_cov`` drops: a random ``clip_cov_ratio`` of all, of those with lb < cov < ub.

    Args:
        columns: old_log_probs, advantages, response_mask of the whole mini-batch.
        config: the actor's section: ``policy_loss.clip_cov_ratio``, ``clip_cov_lb``, ``clip_cov_ub``.
        seed: of the draw, which is the same on every device.
    """
    require(columns, ("old_log_probs", "advantages", "response_mask"), "policy loss 'clip_cov'")
    settings, mask = config.policy_loss, columns["response_mask"]
    cov = token_covariance(columns["old_log_probs"], columns["advantages"], mask)
    candidates = ((cov > settings.clip_cov_lb) & (cov < settings.clip_cov_ub) & mask.bool()).flatten().nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return _selected(mask, candidates[order[: _count(settings.clip_cov_ratio, mask)].to(candidates.device)])


def prepare_kl_cov(columns: Mapping[str, Any], config: Any, seed: int) -> dict[str, Tensor]:
    """Tokens that ``kl_cov`` holds back: the ``kl_cov_ratio`` of all with the largest covariance.

    Of equal ones the first in the order of the batch are taken.

    Args:
        columns: old_log_probs, advantages, response_mask of the whole mini-batch.
        config: the actor's section: ``policy_loss.kl_cov_ratio``.
        seed: not used; nothing is drawn.
    """
    require(columns, ("old_log_probs", "advantages", "response_mask"), "policy loss 'kl_cov'")
    mask = columns["response_mask"]
    valid = mask.bool().flatten().nonzero()[:, 0]
    cov = token_covariance(columns["old_log_probs"], columns["advantages"], mask).flatten()[valid]
    return _selected(mask, valid[_largest(cov, min(_count(config.policy_loss.kl_cov_ratio, mask), len(cov)))])


def _largest(x: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest, of equal ones the first; (n,) → (count,). Faster than to sort them all."""
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device=x.device)
    threshold = x.kthvalue(len(x) - count + 1).values
    above, equal = (x > threshold).nonzero()[:, 0], (x == threshold).nonzero()[:, 0]
    return torch.cat([above, equal[: count - len(above)]])


@register_policy_loss(
    "clip_cov",
    paper=PAPER,
    prepare=prepare_clip_cov,
    reproduces={
        "Clip-Cov": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.0002",
            "actor_rollout_ref.actor.policy_loss.clip_cov_lb=1.0",
            "actor_rollout_ref.actor.policy_loss.clip_cov_ub=5.0",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    cov_selected: Tensor | None = None,
) -> PolicyLossResult:
    """PPO's clip, and no gradient at all for a few random tokens of high covariance.

        cov_t = (log π_old - mean log π_old)·(A - mean A)           means over the mini-batch
        l_t = max(-A·r, -A·clip(r, 1 - ε_low, 1 + ε_high)),  0 on the selected tokens

    Selected is a random ``clip_cov_ratio`` of all tokens, out of those with a covariance between
    ``clip_cov_lb`` and ``clip_cov_ub``, once for the whole mini-batch (:func:`prepare_clip_cov`).
    There is no dual clip. Paper: https://arxiv.org/abs/2505.22617, section 4.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section: ``clip_ratio_low``, ``clip_ratio_high``, ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.
        cov_selected: (bsz, response_length) 1 on the selected tokens; None selects them here, with
            seed 0, as if these rows were the whole mini-batch.

    Returns:
        the loss, and metrics; ``actor/cov_selected_frac`` is the fraction selected.
    """
    config = configured(config, "clip_cov")
    if cov_selected is None:
        cov_selected = prepare_clip_cov(_columns(old_log_prob, advantages, response_mask), config, 0)["cov_selected"]
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    log_ratio, selected = log_ratio_of(log_prob, old_log_prob), cov_selected.bool()
    ratio = log_ratio.exp()
    plain = -A * ratio
    clipped = -A * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    loss_mat = torch.maximum(plain, clipped).masked_fill(selected, 0.0)
    metrics = usual_metrics((clipped > plain) | selected, log_ratio) | {"actor/cov_selected_frac": selected}
    return reduce_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)


@register_policy_loss(
    "kl_cov",
    paper=PAPER,
    prepare=prepare_kl_cov,
    reproduces={
        "KL-Cov, 7B": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
            "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.002",
            "actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1.0",
            "actor_rollout_ref.actor.use_kl_loss=false",
        ),
        "KL-Cov, 32B": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
            "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.0002",
            "actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1.0",
            "actor_rollout_ref.actor.use_kl_loss=false",
        ),
    },
)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    cov_selected: Tensor | None = None,
) -> PolicyLossResult:
    """The ratio without a clip, and a KL penalty on the tokens of highest covariance.

        cov_t = (log π_old - mean log π_old)·(A - mean A)           means over the mini-batch
        l_t = -A·r + ppo_kl_coef · |log π - log π_old|              on the selected tokens
        l_t = -A·r                                                  on the others

    Selected is the ``kl_cov_ratio`` of all tokens with the largest covariance, once for the whole
    mini-batch (:func:`prepare_kl_cov`). Paper: https://arxiv.org/abs/2505.22617, section 4. Nothing
    is clipped, so both clip fractions are 0.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section: ``policy_loss.ppo_kl_coef``, ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.
        cov_selected: (bsz, response_length) 1 on the selected tokens; None selects them here, as if
            these rows were the whole mini-batch.

    Returns:
        the loss, and metrics; ``actor/cov_selected_frac`` is the fraction selected.
    """
    config = configured(config, "kl_cov")
    if cov_selected is None:
        cov_selected = prepare_kl_cov(_columns(old_log_prob, advantages, response_mask), config, 0)["cov_selected"]
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    log_ratio, selected = log_ratio_of(log_prob, old_log_prob), cov_selected.bool()
    penalty = config.policy_loss.ppo_kl_coef * log_ratio.abs()
    loss_mat = -A * log_ratio.exp() + penalty.masked_fill(~selected, 0.0)
    metrics = usual_metrics(torch.zeros_like(log_ratio), log_ratio) | {"actor/cov_selected_frac": selected}
    return reduce_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)


def _columns(old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    return {"old_log_probs": old_log_prob, "advantages": advantages, "response_mask": response_mask}
