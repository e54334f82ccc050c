"""Policy losses on the importance ratio of the whole response.

The ratio of a sequence is repeated on each of its tokens, with its gradient distributed over them::

    s_{i,t} = exp(clamp(sg[x̄_i] + x_{i,t} - sg[x_{i,t}]))        x̄_i the mean of x over the response

Its value is exp(x̄_i) everywhere, and its mean over the response has the gradient of exp(x̄_i). In this form
(GSPO-token in GSPO's paper) ``loss_agg_mode`` decides the weight of a response: with ``seq-mean-token-mean`` all
responses weigh the same, the objective of the GSPO and GMPO papers; with ``token-mean`` or ``seq-mean-token-sum`` the
weight is proportional to the length, LUSPO's objective. Advantages and importance weights may differ from token to
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.loss_registry import LossTerms, register_policy_loss
from verl.utils.torch_functional import masked_mean

SEQUENCE_LOG_RATIO_BOUND = 10.0
"""Upper bound of a response's mean log-ratio; above it there is no gradient."""

LENGTH_UNBIASED_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""Modes in which a token weighs the same in a short and in a long response."""


def sequence_ratio(token_log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Geometric mean of a response's ratios, repeated on each of its tokens; formula at the top of this file.

    ``token_log_ratio`` is x, with gradient. All are (bsz, response_length); the result is 1 on an empty response.
    """
    mean = masked_mean(token_log_ratio.detach(), response_mask, axis=-1).unsqueeze(-1)  # (bsz, 1)
    carried = mean + token_log_ratio - token_log_ratio.detach()
    return carried.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp()


@register_policy_loss(
    "gspo",
    paper="https://arxiv.org/abs/2507.18071",
    returns_terms=True,
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
def gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> LossTerms:
    """Group sequence policy optimization: PPO's clip on the ratio of the whole response.

        s_i = exp(mean_t (log π - log π_old)),  on each token with that token's share of the gradient
        l_t = max(-A·s, -A·clip(s, 1 - ε_low, 1 + ε_high))

    Paper: https://arxiv.org/abs/2507.18071, eq. 5 with ``seq-mean-token-mean``, eq. 13 per token. There is no dual
    clip. The bounds are far smaller than PPO's, because s is a mean over tokens.
    """
    ratio = sequence_ratio(log_prob - old_log_prob, response_mask)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return LossTerms(torch.maximum(plain, clipped), clipped > plain)


@register_policy_loss(
    "luspo",
    paper="https://arxiv.org/abs/2602.05261",
    returns_terms=True,
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
def luspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> LossTerms:
    """Length-unbiased GSPO: the loss of a response times its length.

        L = mean_i |y_i| · max(-A_i·s_i, -A_i·clip(s_i, 1 - ε_low, 1 + ε_high))

    This is ``gspo`` summed over tokens instead of averaged, the mode ``seq-mean-token-sum``. The other modes in which
    all tokens weigh the same differ from it by a constant factor. Modes that divide by a response's or a group's own
    length are refused: with them it would be ``gspo`` again.

    Paper: https://arxiv.org/abs/2602.05261.
    """
    return gspo(old_log_prob, log_prob, advantages, response_mask, clip_ratio_low, clip_ratio_high)


@register_policy_loss(
    "geo_mean",
    paper="https://arxiv.org/abs/2507.20673",
    returns_terms=True,
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
def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> LossTerms:
    """Geometric-mean policy optimization: the geometric mean of the clipped ratios of a response's tokens.

        x_t = min(Δ_t, ε_high)  where A > 0,  max(Δ_t, -ε_low)  where A < 0       Δ = log π - log π_old
        l_t = -A · exp(mean_t x_t),  on each token with that token's share of the gradient

    The bounds are those of the logarithm: the ratio may be e^{-ε_low} to e^{ε_high}. A clipped token gets no gradient,
    the other tokens of the response still do.

    Paper: https://arxiv.org/abs/2507.20673, whose objective it is with ``seq-mean-token-mean``.
    """
    log_ratio = log_prob - old_log_prob
    is_cut_above = (advantages > 0) & (log_ratio > clip_ratio_high)
    is_cut_below = (advantages < 0) & (log_ratio < -clip_ratio_low)
    cut = torch.where(is_cut_above, torch.full_like(log_ratio, clip_ratio_high), log_ratio)
    cut = torch.where(is_cut_below, torch.full_like(log_ratio, -clip_ratio_low), cut)
    return LossTerms(-advantages * sequence_ratio(cut, response_mask), is_cut_above, is_cut_below)
