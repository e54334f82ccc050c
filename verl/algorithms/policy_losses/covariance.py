"""Losses that treat tokens of high covariance separately, to keep the entropy of the policy up.

The covariance of a token's log-probability and its advantage, over all valid tokens of the
mini-batch, measures how much a step on it lowers the entropy::

    cov_t = (log π_t - mean log π) · (A_t - mean A)

Means, largest values and random draws are those of the whole mini-batch, so ``prepare`` selects the tokens once,
before the rows are distributed, and returns them as the column ``cov_selected``. It uses the log-probs at the start of
the update. In the first mini-batch these are the ones of the paper; in later ones the paper uses the current policy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.loss_registry import LossTerms, bounded_log_ratio, register_policy_loss
from verl.config.actor import ActorConfig
from verl.schema import require
from verl.utils.torch_functional import masked_mean, zero_masked


def token_covariance(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(log π - mean log π)·(A - mean A) with means over all valid tokens; (bsz, response_length) float64."""
    log_probs, A = (zero_masked(column, response_mask).double() for column in (log_probs.detach(), advantages))
    return (log_probs - masked_mean(log_probs, response_mask)) * (A - masked_mean(A, response_mask))


def prepare_clip_cov(columns: Mapping[str, Tensor], config: ActorConfig, seed: int) -> dict[str, Tensor]:
    """Select the tokens that ``clip_cov`` drops: a random ``clip_cov_ratio`` of all, among those with lb < cov < ub.

    ``columns`` are old_log_probs (of the current policy), advantages and response_mask of the whole
    mini-batch. The draw of a ``seed`` is the same on every device.
    """
    require(columns, ("old_log_probs", "advantages", "response_mask"), "policy loss 'clip_cov'")
    settings, mask = config.policy_loss, columns["response_mask"]
    cov = token_covariance(columns["old_log_probs"], columns["advantages"], mask)
    candidates = ((cov > settings.clip_cov_lb) & (cov < settings.clip_cov_ub) & mask.bool()).flatten().nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return _selected(mask, candidates[order[: _count(settings.clip_cov_ratio, mask)].to(candidates.device)])


def prepare_kl_cov(columns: Mapping[str, Tensor], config: ActorConfig, seed: int) -> dict[str, Tensor]:
    """Select the tokens that ``kl_cov`` penalises: the ``kl_cov_ratio`` of all with the largest covariance.

    Among equal ones the first in batch order are taken. ``columns`` are old_log_probs (of the
    current policy), advantages and response_mask of the whole mini-batch; ``seed`` is not used, since nothing is drawn.
    """
    require(columns, ("old_log_probs", "advantages", "response_mask"), "policy loss 'kl_cov'")
    mask = columns["response_mask"]
    valid = mask.bool().flatten().nonzero()[:, 0]
    cov = token_covariance(columns["old_log_probs"], columns["advantages"], mask).flatten()[valid]
    count = min(_count(config.policy_loss.kl_cov_ratio, mask), len(cov))
    if count == 0:
        return _selected(mask, valid[:0])
    threshold = cov.kthvalue(len(cov) - count + 1).values  # faster than to sort them all
    above, equal = (cov > threshold).nonzero()[:, 0], (cov == threshold).nonzero()[:, 0]
    return _selected(mask, valid[torch.cat([above, equal[: count - len(above)]])])


def _count(fraction: float, response_mask: Tensor) -> int:
    """Number of tokens in a fraction of the valid ones: rounded down, but at least one unless the fraction is 0."""
    return max(int(fraction * int(response_mask.bool().sum())), 1) if fraction > 0 else 0


def _selected(response_mask: Tensor, flat_positions: Tensor) -> dict[str, Tensor]:
    selection = torch.zeros(response_mask.numel(), dtype=torch.int64, device=response_mask.device)
    selection[flat_positions] = 1
    return {"cov_selected": selection.view(response_mask.shape)}


@register_policy_loss(
    "clip_cov",
    paper="https://arxiv.org/abs/2505.22617",
    returns_terms=True,
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
def clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    cov_selected: Tensor = None,  # pyright: ignore[reportArgumentType]  what `prepare` makes has this default
) -> LossTerms:
    """PPO's clip, with no gradient for a few random tokens of high covariance.

        cov_t = (sg[log π] - mean log π)·(A - mean A)               means over the mini-batch
        l_t = max(-A·r, -A·clip(r, 1 - ε_low, 1 + ε_high)),  0 on the selected tokens

    A random ``clip_cov_ratio`` of all tokens is selected, among those with a covariance between ``clip_cov_lb`` and
    ``clip_cov_ub``, for the whole mini-batch, by the current policy (:func:`prepare_clip_cov`). There is no dual clip.
    ``actor/cov_selected_frac`` is the fraction selected. Paper: https://arxiv.org/abs/2505.22617, section 4.
    """
    ratio, selected = bounded_log_ratio(log_prob, old_log_prob).exp(), cov_selected.bool()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    losses = torch.maximum(plain, clipped).masked_fill(selected, 0.0)
    return LossTerms(losses, (clipped > plain) | selected, metrics={"actor/cov_selected_frac": selected})


@register_policy_loss(
    "kl_cov",
    paper="https://arxiv.org/abs/2505.22617",
    returns_terms=True,
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
def kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    ppo_kl_coef: float,
    cov_selected: Tensor = None,  # pyright: ignore[reportArgumentType]  what `prepare` makes has this default
) -> LossTerms:
    """The ratio without a clip, and a KL penalty on the tokens of highest covariance.

        cov_t = (sg[log π] - mean log π)·(A - mean A)               means over the mini-batch
        l_t = -A·r + ppo_kl_coef · |log π - log π_old|              on the selected tokens
        l_t = -A·r                                                  on the others

    The ``kl_cov_ratio`` of all tokens with the largest covariance is selected, once for the whole mini-batch
    (:func:`prepare_kl_cov`). Nothing is clipped, so both clip fractions are 0. ``actor/cov_selected_frac`` is the
    fraction selected. Paper: https://arxiv.org/abs/2505.22617, section 4.
    """
    log_ratio, selected = bounded_log_ratio(log_prob, old_log_prob), cov_selected.bool()
    penalty = (ppo_kl_coef * log_ratio.abs()).masked_fill(~selected, 0.0)
    return LossTerms(-advantages * log_ratio.exp() + penalty, metrics={"actor/cov_selected_frac": selected})
