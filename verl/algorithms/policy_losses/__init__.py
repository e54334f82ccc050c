"""Policy losses per token: pure functions of tensors and numbers.

With r = π / π_old, μ the policy that drew the samples, A the advantage and sg[·] the stop-gradient:

=========== ========================================================= ==================
name        loss of a token                                           paper
=========== ========================================================= ==================
vanilla     max(-A r, -A clip(r)), dual clip                          arXiv:1707.06347
clip_cov    the same without dual clip, 0 on selected tokens          arXiv:2505.22617
kl_cov      -A r, + c abs(log r) on selected tokens                   arXiv:2505.22617
gspo        PPO's clip on the ratio of the response                   arXiv:2507.18071
luspo       the same, times the length of the response                arXiv:2602.05261
geo_mean    -A · geometric mean of clipped ratios                     arXiv:2507.20673
sapo        -A σ(τ(r - 1)) 4/τ                                        arXiv:2511.20347
dro         -(A log π - ½ β (log r)²)                                 arXiv:2405.19107
gpg         -A log π                                                  arXiv:2504.02546
cispo       -sg[clip(r)] A log π                                      arXiv:2506.13585
dppo_tv     -sg[M min(r, c)] A log π, M by total variation            arXiv:2602.04879
dppo_kl     the same, M by binary KL                                  arXiv:2602.04879
up          -A π/sg[π] where A > 0, elsewhere vanilla                 arXiv:2607.06987
cfpo        -(A r - abs(A)/(2ε) (r - 1)²)                             arXiv:2601.22801
vespo       -sg[W^k e^(λ(1 - W))] A log π, W = Π π/μ                  arXiv:2602.10693
topr        -sg[min(W, 1)] A log π where A < 0, elsewhere -A log π    arXiv:2503.14286
m2po        -M A π/μ, M by the mean of (log π/μ)² over the mini-batch arXiv:2510.01161
bypass_mode vanilla, or -sg[w] A log π, with the rollout as π_old     arXiv:1707.06347
=========== ========================================================= ==================

Shared arguments, each (bsz, response_length) and 0 where ``response_mask`` is 0: ``old_log_prob`` of the
policy at the start of the update, ``log_prob`` of the policy being updated, with gradient, and ``advantages``. Others
are settings of ``actor`` or ``actor.policy_loss``, or columns that ``prepare`` computes.
:mod:`verl.algorithms.loss_registry` weights and aggregates the returned terms.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms.aggregate import agg_loss
from verl.algorithms.loss_registry import PolicyLossResult, evaluate_policy_loss, get_policy_loss_fn, policy_loss_info
from verl.algorithms.policy_losses import behaviour, bypass, covariance, sequence, token  # noqa: F401  they register losses
from verl.config.actor import ActorConfig
from verl.utils.torch_functional import masked_mean, zero_masked


def _public_form(name: str) -> Callable[..., PolicyLossResult]:
    function = get_policy_loss_fn(name)
    function.__module__ = __name__  # where pickle finds it
    return function


compute_policy_loss_bypass_mode = _public_form("bypass_mode")
compute_policy_loss_cispo = _public_form("cispo")
compute_policy_loss_clip_cov = _public_form("clip_cov")
compute_policy_loss_dppo_kl = _public_form("dppo_kl")
compute_policy_loss_dppo_tv = _public_form("dppo_tv")
compute_policy_loss_dro = _public_form("dro")
compute_policy_loss_geo_mean = _public_form("geo_mean")
compute_policy_loss_gpg = _public_form("gpg")
compute_policy_loss_gspo = _public_form("gspo")
compute_policy_loss_kl_cov = _public_form("kl_cov")
compute_policy_loss_luspo = _public_form("luspo")
compute_policy_loss_sapo = _public_form("sapo")
compute_policy_loss_vanilla = _public_form("vanilla")


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor | None = None,
    cliprange: float = 0.2,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the vanilla loss without a configuration object.

    Tensors are (bsz, response_length); without a ``response_mask`` every token counts. ``cliprange`` bounds both sides
    unless ``cliprange_low`` or ``cliprange_high`` is given. The denominators of ``loss_agg_mode`` are the counts of
    these tensors.

    Returns:
        loss, clipped fraction, KL estimate, dual-clipped fraction; scalars.
    """
    config = ActorConfig(
        clip_ratio_low=cliprange if cliprange_low is None else cliprange_low,
        clip_ratio_high=cliprange if cliprange_high is None else cliprange_high,
        clip_ratio_c=clip_ratio_c,
    )
    mask = torch.ones_like(log_prob) if response_mask is None else response_mask
    columns = {"old_log_probs": old_log_prob, "advantages": advantages, "response_mask": mask}
    info = policy_loss_info("vanilla")
    loss, metrics = evaluate_policy_loss(info, log_prob, columns, None, loss_agg_mode, config, totals={})
    return loss, metrics["actor/pg_clipfrac"], metrics["actor/ppo_kl"], metrics["actor/pg_clipfrac_lower"]


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: object = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossResult:
    """Compute the policy gradient on samples of the rollout, weighted by given importance weights.

        l = -sg[w] · A · log π

    Args:
        rollout_log_prob: (bsz, response_length) of the sampling distribution, for the metric only.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section; its ``global_batch_info`` holds the denominators, by default the counts of these
            rows.
        rollout_is_weights: (bsz, response_length) w, or None for 1.

    Returns:
        the loss, a scalar; and ``actor/ppo_kl``, the mean of log μ - log π over the valid tokens.
    """
    losses = zero_masked(-advantages * log_prob, response_mask)
    if rollout_is_weights is not None:
        losses = losses * zero_masked(rollout_is_weights, response_mask).detach()
    loss = agg_loss(losses, response_mask, loss_agg_mode, **(getattr(config, "global_batch_info", None) or {}))
    kl = masked_mean(rollout_log_prob - log_prob.detach(), response_mask)
    return loss, {"actor/ppo_kl": kl.item()}
