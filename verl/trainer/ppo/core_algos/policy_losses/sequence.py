"""Losses whose ratio belongs to the whole response.

The ratio of a sequence is written on each of its tokens, and its gradient is shared out to them::

    s_{i,t} = exp(clamp(sg[x̄_i] + x_{i,t} - sg[x_{i,t}]))        x̄_i the mean of x over the response

so its value is that of exp(x̄_i) everywhere, and the mean over the response has the gradient of
exp(x̄_i). Written so (GSPO's paper calls it GSPO-token), ``loss_agg_mode`` says what a response
weighs: with ``seq-mean-token-mean`` each response weighs the same, which is the objective of the
GSPO and GMPO papers; with ``token-mean`` or ``seq-mean-token-sum`` it weighs what its tokens do,
which is LUSPO's. Advantages and importance weights may differ from token to token.
"""

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
from verl.utils.torch_functional import masked_mean

SEQUENCE_LOG_RATIO_BOUND = 10.0
"""The mean log-ratio of a response is cut here from above; beyond it there is no gradient."""

LENGTH_UNBIASED_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""Modes in which a token weighs the same in a short and in a long response."""


def sequence_ratio(token_log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """The geometric mean of a response's ratios on each of its tokens; see the head of this file.

    Args:
        token_log_ratio: (bsz, response_length) x, with gradient.
        response_mask: (bsz, response_length).

    Returns:
        (bsz, response_length); 1 on every token of an empty response.
    """
    mean = masked_mean(token_log_ratio.detach(), response_mask, axis=-1).unsqueeze(-1)  # (bsz, 1)
    carried = mean + token_log_ratio - token_log_ratio.detach()
    return carried.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp()


@register_policy_loss(
    "gspo",
    paper="https://arxiv.org/abs/2507.18071",
    paper_mode="seq-mean-token-mean",
    reproduces={
        "GSPO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            "actor_rollout_ref.actor.clip_ratio_low=3e-4",
            "actor_rollout_ref.actor.clip_ratio_high=4e-4",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """Group sequence policy optimization: PPO's clip on the ratio of the whole response.

        s_i = exp(mean_t (log π - log π_old)),  on each token with that token's share of the gradient
        l_t = max(-A·s, -A·clip(s, 1 - ε_low, 1 + ε_high))

    Paper: https://arxiv.org/abs/2507.18071, eq. 5 with ``seq-mean-token-mean``, eq. 13 per token.
    Releases of verl ignore ``loss_agg_mode`` here and always take the mean of means; ours is what
    the setting says. There is no dual clip. The bounds are far smaller than PPO's: s is a mean.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length), equal on the tokens of a response in the paper.
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: what a response weighs; see the head of this file.
        config: the actor's section: ``clip_ratio_low``, ``clip_ratio_high``, ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.
    """
    config = configured(config, "gspo")
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    ratio = sequence_ratio(log_prob - old_log_prob, response_mask)
    plain = -A * ratio
    clipped = -A * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    metrics = usual_metrics(clipped > plain, log_ratio_of(log_prob, old_log_prob))
    loss_mat = torch.maximum(plain, clipped)
    return reduce_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)


@register_policy_loss(
    "luspo",
    paper="https://arxiv.org/abs/2602.05261",
    modes=LENGTH_UNBIASED_MODES,
    paper_mode="seq-mean-token-sum",
    reproduces={
        "LUSPO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=luspo",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
        )
    },
)
def compute_policy_loss_luspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """Length-unbiased GSPO: the loss of a response times its length.

        L = mean_i |y_i| · max(-A_i·s_i, -A_i·clip(s_i, 1 - ε_low, 1 + ε_high))

    That is ``gspo`` summed over tokens instead of averaged, the mode
    ``seq-mean-token-sum``. The other modes in which all tokens weigh the same differ from it by a
    factor that is common to the mini-batch: B / N (``token-mean``), B (``token-sum``), 1 / S
    (``seq-mean-token-sum-norm``).

    Paper: https://arxiv.org/abs/2602.05261.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: one of ``LENGTH_UNBIASED_MODES``.
        config: the actor's section, as for gspo.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.

    Raises:
        ConfigError: the mode divides by a response's or a group's own length, the bias that this
            loss is there to remove.
    """
    if loss_agg_mode not in LENGTH_UNBIASED_MODES:
        raise ConfigError(
            f"policy loss 'luspo' weighs a response by its length, and loss_agg_mode='{loss_agg_mode}' would divide "
            f"that out again (then it is gspo). Use seq-mean-token-sum, the paper's, or one of: "
            f"{', '.join(LENGTH_UNBIASED_MODES)}."
        )
    return compute_policy_loss_gspo(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        configured(config, "luspo"),
        rollout_is_weights,
    )


@register_policy_loss(
    "geo_mean",
    paper="https://arxiv.org/abs/2507.20673",
    paper_mode="seq-mean-token-mean",
    reproduces={
        "GMPO": (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            "actor_rollout_ref.actor.clip_ratio_low=0.4",
            "actor_rollout_ref.actor.clip_ratio_high=0.4",
        )
    },
)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """Geometric-mean policy optimization: each token's ratio is clipped, then their geometric mean taken.

        x_t = min(Δ_t, ε_high)  where A > 0,  max(Δ_t, -ε_low)  where A < 0       Δ = log π - log π_old
        l_t = -A · exp(mean_t x_t),  on each token with that token's share of the gradient

    The bounds hold for the logarithm: the ratio may be e^{-ε_low} to e^{ε_high}. A token that is
    cut gets no gradient, its siblings in the response still do.

    Paper: https://arxiv.org/abs/2507.20673, whose objective it is with ``seq-mean-token-mean``. Releases of verl
    ignore ``loss_agg_mode`` here and average the sequences of each micro-batch by themselves.

    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length), equal on the tokens of a response in the paper.
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: what a response weighs; see the head of this file.
        config: the actor's section: ``clip_ratio_low``, ``clip_ratio_high``, ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.
    """
    config = configured(config, "geo_mean")
    old_log_prob, log_prob, A = valid_only(response_mask, old_log_prob, log_prob, advantages)
    log_ratio = log_prob - old_log_prob
    is_cut_above = (A > 0) & (log_ratio > config.clip_ratio_high)
    is_cut_below = (A < 0) & (log_ratio < -config.clip_ratio_low)
    cut = torch.where(is_cut_above, torch.full_like(log_ratio, config.clip_ratio_high), log_ratio)
    cut = torch.where(is_cut_below, torch.full_like(log_ratio, -config.clip_ratio_low), cut)
    loss_mat = -A * sequence_ratio(cut, response_mask)
    metrics = usual_metrics(is_cut_above, log_ratio_of(log_prob, old_log_prob), is_cut_below)
    return reduce_loss(loss_mat, response_mask, loss_agg_mode, config, rollout_is_weights, metrics)
