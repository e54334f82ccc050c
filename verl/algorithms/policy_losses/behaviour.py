"""Policy losses that compare the policy with the one that drew the samples, whatever updates lie between them.

They read ``rollout_log_probs``, log μ of each token as the engine drew it, beside the log-probs of the policy before
the update. So they correct for older weights and for the difference between engines by themselves:
``algorithm.rollout_correction.rollout_is`` would count a part of the ratio twice and is refused with them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.loss_registry import LossTerms, bounded_log_ratio, register_policy_loss
from verl.algorithms.rollout_correction import LOG_RATIO_BOUND, log_ratio_of
from verl.config.actor import ActorConfig
from verl.schema import require
from verl.utils.torch_functional import zero_masked


def response_log_ratio(log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """clamp(Σ_t (log π - log μ), ±20) of each response, (bsz, 1) float64, without gradient."""
    total = log_ratio_of(log_prob, rollout_log_prob, response_mask).sum(-1, keepdim=True)
    return total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@register_policy_loss(
    "vespo",
    paper="https://arxiv.org/abs/2602.10693",
    returns_terms=True,
    reproduces={
        "VESPO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=vespo",
            "actor_rollout_ref.actor.policy_loss.vespo_k_pos=2.0",
            "actor_rollout_ref.actor.policy_loss.vespo_lambda_pos=3.0",
            "actor_rollout_ref.actor.policy_loss.vespo_k_neg=3.0",
            "actor_rollout_ref.actor.policy_loss.vespo_lambda_neg=2.0",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)
def vespo(
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    rollout_log_probs: Tensor,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> LossTerms:
    """Variational sequence-level soft policy optimization: a smooth weight of the ratio of the whole response.

        W = Π_t π(y_t) / μ(y_t)        φ(W) = W^k · e^{λ(1 - W)}        l_t = -sg[φ(W)] · A · log π

    (k, λ) are ``vespo_k_pos`` and ``vespo_lambda_pos`` where A ≥ 0, else ``..._neg``. φ(1) = 1, and φ falls to 0 on
    both sides of its maximum at W = k / λ: a response far from the policy counts little, with no bound at which its
    gradient stops. With k = 1 and λ = 0 it is importance sampling of responses. ``actor/vespo_weight`` is the mean of
    φ.

    Paper: https://arxiv.org/abs/2602.10693.
    """
    log_w = response_log_ratio(log_prob, rollout_log_probs, response_mask)
    is_positive = advantages >= 0
    k = torch.where(is_positive, vespo_k_pos, torch.full_like(advantages, vespo_k_neg)).double()
    rate = torch.where(is_positive, vespo_lambda_pos, torch.full_like(advantages, vespo_lambda_neg)).double()
    weight = (k * log_w + rate * (1.0 - log_w.exp())).exp()
    return LossTerms(-weight.to(log_prob.dtype) * advantages * log_prob, metrics={"actor/vespo_weight": weight})


@register_policy_loss(
    "topr",
    paper="https://arxiv.org/abs/2503.14286",
    returns_terms=True,
    paper_mode="seq-mean-token-sum",
    reproduces={
        "TOPR": (
            "algorithm.adv_estimator=grpo",
            "algorithm.norm_adv_by_std_in_grpo=false",
            "actor_rollout_ref.actor.policy_loss.loss_mode=topr",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)
def topr(log_prob: Tensor, advantages: Tensor, response_mask: Tensor, rollout_log_probs: Tensor) -> LossTerms:
    """Tapered off-policy REINFORCE: good responses count in full, bad ones as much as the policy still gives them.

        W = Π_t π(y_t) / μ(y_t)        w = 1 where A ≥ 0, min(W, 1) where A < 0        l_t = -sg[w] · A · log π

    A bad response that the policy has unlearned stops to push; a good one is imitated however unlikely it has become.
    ``actor/pg_clipfrac`` counts tokens with A < 0 and W > 1.

    Paper: https://arxiv.org/abs/2503.14286, eq. 8 with the bounds [0, 1] for negative rewards.
    """
    ratio = response_log_ratio(log_prob, rollout_log_probs, response_mask).exp().to(log_prob.dtype)
    is_negative = advantages < 0
    weight = torch.where(is_negative, ratio.clamp(max=1.0), torch.ones_like(advantages))
    return LossTerms(-weight * advantages * log_prob, is_negative & (ratio > 1.0))


def prepare_m2po(columns: Mapping[str, Tensor], config: ActorConfig, seed: int) -> dict[str, Tensor]:
    """Select the tokens that stay in the loss ``m2po``: the column ``m2_mask``.

    ``columns`` are old_log_probs (of the current policy), rollout_log_probs, advantages and response_mask
    of the whole mini-batch; ``seed`` is not used, since nothing is drawn.
    """
    names = ("old_log_probs", "rollout_log_probs", "advantages", "response_mask")
    require(columns, names, "policy loss 'm2po'")
    mask = columns["response_mask"]
    log_ratio = log_ratio_of(columns["old_log_probs"], columns["rollout_log_probs"], mask)
    is_kept = second_moment_mask(log_ratio, columns["advantages"], mask, config.policy_loss.m2_threshold)
    return {"m2_mask": is_kept.long()}


def second_moment_mask(log_ratio: Tensor, advantages: Tensor, response_mask: Tensor, threshold: float) -> Tensor:
    """Take out the largest log-ratios until the mean of their squares is at most ``threshold``.

    Only tokens count on which PPO's clip would act: A > 0 with a ratio above 1, or A < 0 with one below. Of equal
    squares the last in batch order are taken out first.

    Args:
        log_ratio: (bsz, response_length) log π - log μ.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length).
        threshold: τ, the largest mean of (log π - log μ)² over those that stay.

    Returns:
        (bsz, response_length) bool, False on the tokens taken out and on masked ones.
    """
    valid = response_mask.bool()
    delta, A = zero_masked(log_ratio.double(), valid), zero_masked(advantages, valid)
    outward = (valid & (((A > 0) & (delta > 0)) | ((A < 0) & (delta < 0)))).flatten().nonzero()[:, 0]
    squares, order = (delta.flatten()[outward] ** 2).sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    is_kept = valid.flatten().clone()
    # The mean over the n smallest squares grows with n.
    is_kept[outward[order[int((means <= threshold).sum()) :]]] = False
    return is_kept.view(valid.shape)


@register_policy_loss(
    "m2po",
    paper="https://arxiv.org/abs/2510.01161",
    returns_terms=True,
    prepare=prepare_m2po,
    reproduces={
        "M2PO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=m2po",
            "actor_rollout_ref.actor.policy_loss.m2_threshold=0.04",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)
def m2po(
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    rollout_log_probs: Tensor,
    m2_mask: Tensor = None,  # pyright: ignore[reportArgumentType]  what `prepare` makes has this default
) -> LossTerms:
    """Second-moment trust policy optimization: no clip, but the most extreme ratios of a mini-batch are taken out.

        r = π / μ        l_t = -M · A · r
        M = 0 on the largest (log r)² until those that stay have mean (log r)² ≤ τ      τ = ``m2_threshold``

    Only tokens on which PPO's clip would act are counted and taken out; they stay in the denominator. τ is a bound of
    the whole mini-batch, so one stale token need not cost others their gradient. The mask is that of the current policy
    in each mini-batch (:func:`second_moment_mask`), which costs a forward pass in all but the first.
    ``actor/pg_clipfrac`` counts what is taken out.

    Paper: https://arxiv.org/abs/2510.01161, eq. 5 and algorithm 1.
    """
    ratio = bounded_log_ratio(log_prob, zero_masked(rollout_log_probs, response_mask)).exp()
    is_kept = m2_mask.bool()
    return LossTerms((-advantages * ratio).masked_fill(~is_kept, 0.0), ~is_kept)
