"""The algorithms: pure functions of tensors, chosen by name.

==================== ============================================ ==========================================
estimator            advantage                                    paper
==================== ============================================ ==========================================
gae                  Σ_k (γλ)^k δ_{t+k}, whitened                 arXiv:1506.02438
grpo                 (R - mean_g) / std_g; or without std         arXiv:2402.03300, 2503.20783
rloo                 R - mean of the siblings                     arXiv:2402.14740
reinforce_plus_plus  discounted return, whitened                  arXiv:2501.03262
remax                reward to go - reward of greedy response     arXiv:2310.10505
==================== ============================================ ==========================================

Policy loss: ``vanilla``, PPO's clip with separate bounds and dual clip (arXiv:1707.06347, 2503.14476,
1912.09729). Add your own with :func:`register_adv_est` and :func:`register_policy_loss`.
"""

from enum import StrEnum

from verl.trainer.ppo.core_algos.advantages import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.trainer.ppo.core_algos.aggregate import LOSS_AGG_MODES, agg_loss, compute_entropy_loss
from verl.trainer.ppo.core_algos.bypass import compute_policy_loss_bypass_mode
from verl.trainer.ppo.core_algos.kl import (
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_in_reward,
    kl_penalty,
)
from verl.trainer.ppo.core_algos.policy_losses import compute_policy_loss, compute_policy_loss_vanilla
from verl.trainer.ppo.core_algos.registry import (
    EstimatorNeeds,
    adv_needs,
    compute_advantages,
    estimator_names,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    policy_loss_columns,
    register_adv_est,
    register_policy_loss,
)
from verl.trainer.ppo.core_algos.value_loss import compute_value_loss

AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in estimator_names()})
"""The built-in estimators, each equal to its name: ``AdvantageEstimator.GAE == "gae"``."""

__all__ = [
    "LOSS_AGG_MODES",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "EstimatorNeeds",
    "FixedKLController",
    "adv_needs",
    "agg_loss",
    "compute_advantages",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "estimator_names",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_in_reward",
    "kl_penalty",
    "policy_loss_columns",
    "register_adv_est",
    "register_policy_loss",
]
