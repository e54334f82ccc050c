"""Policy losses: pure per-token maths, and the registered functions that read settings and aggregate.

Each takes ``old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights`` and returns the loss with its metrics. At masked places no input is read. With r
= π / π_old and sg[·] a constant to the gradient:

========== ====================================================== ================== ======
name       loss of a token                                        paper              file
========== ====================================================== ================== ======
vanilla    max(-A r, -A clip(r)), dual clip                       arXiv:1707.06347   clipped
clip_cov   the same without dual clip, 0 on chosen tokens         arXiv:2505.22617   covariance
kl_cov     -A r, + c abs(log r) on chosen tokens                  arXiv:2505.22617   covariance
gspo       PPO's clip on the ratio of the response                arXiv:2507.18071   sequence
luspo      the same, times the length of the response             arXiv:2602.05261   sequence
geo_mean   -A · geometric mean of clipped ratios                  arXiv:2507.20673   sequence
sapo       -A σ(τ(r - 1)) 4/τ                                     arXiv:2511.20347   smooth
dro        -(A log π - ½ β (log r)²)                              arXiv:2405.19107   smooth
gpg        -A log π                                               arXiv:2504.02546   score
cispo      -sg[clip(r)] A log π                                   arXiv:2506.13585   score
dppo_tv    -sg[M min(r, c)] A log π, M by distance of π           arXiv:2602.04879   score
dppo_kl    the same, M by binary KL                               arXiv:2602.04879   score
========== ====================================================== ================== ======
"""

from verl.trainer.ppo.core_algos.policy_losses.clipped import (
    ClippedSurrogate,
    clipped_surrogate,
    compute_policy_loss,
    compute_policy_loss_vanilla,
)
from verl.trainer.ppo.core_algos.policy_losses.common import (
    LOG_RATIO_BOUND,
    log_ratio_of,
    reduce_loss,
    usual_metrics,
    weighted,
)
from verl.trainer.ppo.core_algos.policy_losses.covariance import (
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
    token_covariance,
)
from verl.trainer.ppo.core_algos.policy_losses.score import (
    compute_policy_loss_cispo,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_gpg,
)
from verl.trainer.ppo.core_algos.policy_losses.sequence import (
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    compute_policy_loss_luspo,
)
from verl.trainer.ppo.core_algos.policy_losses.smooth import compute_policy_loss_dro, compute_policy_loss_sapo

__all__ = [
    "LOG_RATIO_BOUND",
    "ClippedSurrogate",
    "clipped_surrogate",
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_luspo",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "log_ratio_of",
    "reduce_loss",
    "token_covariance",
    "usual_metrics",
    "weighted",
]
