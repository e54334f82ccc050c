"""Advantage estimators, policy losses, KL and entropy terms: pure functions of tensors, chosen by name.

============================ ========================================== ==============================
estimator                    advantage                                  paper
============================ ========================================== ==============================
gae                          Σ_k (γλ)^k δ_{t+k}, whitened               arXiv:1506.02438
bi_level_gae                 gae over turns, then inside of each turn   arXiv:2510.16907
grpo                         (R - mean_g) / std_g; or without std       arXiv:2402.03300, 2503.20783
grpo_passk                   best - second best, on the best alone      arXiv:2503.19595
grpo_per_turn                grpo of the return of each turn            arXiv:2505.11821
gdpo                         Σ_k w_k grpo(r_k), whitened                arXiv:2601.05242
rloo                         R - mean of the siblings                   arXiv:2402.14740
reinforce_plus_plus          discounted return, whitened                arXiv:2501.03262
reinforce_plus_plus_baseline R - mean_g, whitened                       arXiv:2501.03262
remax                        reward to go - reward of greedy response   arXiv:2310.10505
opo                          R - mean_g weighted by length              arXiv:2505.23585
gpg                          (R - mean_g) · rows / rows with R ≠ 0      arXiv:2504.02546
maxrl                        (R - mean_g) / mean_g                      arXiv:2602.02710
gigpo                        grpo + ω · grpo of turns from one state    arXiv:2505.10978
hierarchical_grpo            grpo, solvers within one problem           prime-rl docs
rae                          R - running mean of the agent's rewards    arXiv:2506.24119
optimal_token_baseline       G_t - Σ_g G_t W_t / Σ_g W_t                verl docs, algo/otb
tir_optimal_token_baseline   the same, tool tokens removed              verl docs, algo/otb
============================ ========================================== ==============================

``grpo_vectorized`` and ``rloo_vectorized`` are other names of ``grpo`` and ``rloo``. The policy losses are listed in
:mod:`verl.algorithms.policy_losses`; ``policy_loss_info(name)`` has the paper of each and the settings it published.
Add your own with :func:`register_adv_est` and :func:`register_policy_loss`.
"""

from enum import StrEnum

from verl.algorithms.aggregate import LOSS_AGG_MODES, LossTotals, agg_loss, compute_entropy_loss, prepare_aggregation
from verl.algorithms.entropy import (
    EntropyController,
    FixedEntropyController,
    TargetEntropyController,
    get_entropy_controller,
    top_entropy_mask,
)
from verl.algorithms.estimator_registry import (
    ADV_ESTIMATOR_REGISTRY,
    EstimatorNeeds,
    adv_needs,
    compute_advantages,
    estimator_names,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    bias_corrected_kl,
    compute_rewards,
    get_kl_controller,
    kl_in_reward,
    kl_penalty,
    kl_penalty_forward,
)
from verl.algorithms.loss_registry import (
    POLICY_LOSS_REGISTRY,
    LossTerms,
    PolicyLossInfo,
    clipped_tokens,
    evaluate_policy_loss,
    get_policy_loss_fn,
    loss_and_metrics,
    policy_loss_columns,
    policy_loss_info,
    policy_loss_names,
    register_policy_loss,
)
from verl.algorithms.policy_losses import (
    compute_policy_loss,
    compute_policy_loss_bypass_mode,
    compute_policy_loss_cispo,
    compute_policy_loss_clip_cov,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_kl_cov,
    compute_policy_loss_luspo,
    compute_policy_loss_reinforce,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
)
from verl.algorithms.prepare import prepare_policy_loss, prepare_update, update_columns
from verl.algorithms.response_advantages import (
    RoleBaselines,
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_hierarchical_grpo_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_rae_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from verl.algorithms.reweight import compute_pf_ppo_reweight_data
from verl.algorithms.token_advantages import (
    compute_bi_level_gae_advantage_return,
    compute_gae_advantage_return,
    compute_gigpo_advantage,
    compute_grpo_per_turn_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from verl.algorithms.value_loss import compute_value_loss

AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in estimator_names()})
"""The built-in estimators, each equal to its name: ``AdvantageEstimator.GAE == "gae"``."""

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "LOSS_AGG_MODES",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "EntropyController",
    "EstimatorNeeds",
    "FixedEntropyController",
    "FixedKLController",
    "LossTerms",
    "LossTotals",
    "PolicyLossInfo",
    "RoleBaselines",
    "TargetEntropyController",
    "adv_needs",
    "agg_loss",
    "bias_corrected_kl",
    "clipped_tokens",
    "compute_advantages",
    "compute_bi_level_gae_advantage_return",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gigpo_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_per_turn_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_hierarchical_grpo_advantage",
    "compute_maxrl_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_pf_ppo_reweight_data",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
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
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_rae_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_value_loss",
    "estimator_names",
    "evaluate_policy_loss",
    "get_adv_estimator_fn",
    "get_entropy_controller",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_in_reward",
    "kl_penalty",
    "kl_penalty_forward",
    "loss_and_metrics",
    "policy_loss_columns",
    "policy_loss_info",
    "policy_loss_names",
    "prepare_aggregation",
    "prepare_policy_loss",
    "prepare_update",
    "register_adv_est",
    "register_policy_loss",
    "top_entropy_mask",
    "update_columns",
]
