"""Advantage estimators: rewards in, advantages and returns out, both (bsz, response_length) and 0 off the mask.

    actor_critic     along one response: gae, reinforce_plus_plus, remax
    group_baselines  the whole response against its siblings: grpo, rloo, grpo_passk, opo, gpg, maxrl, gdpo,
                     reinforce_plus_plus_baseline
    per_token        siblings at the same token or turn: optimal_token_baseline, tir_optimal_token_baseline,
                     grpo_per_turn

What any column holds at a masked place is never read. A response without a token of the policy has
no influence on its siblings.
"""

from verl.trainer.ppo.core_algos.advantages.actor_critic import (
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from verl.trainer.ppo.core_algos.advantages.group_baselines import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from verl.trainer.ppo.core_algos.advantages.per_token import (
    compute_grpo_per_turn_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)

__all__ = [
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_per_turn_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_maxrl_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
]
