"""Estimators that look along one response: a critic's values, a greedy baseline, or the batch alone."""

from __future__ import annotations

from torch import Tensor

from verl.trainer.ppo.core_algos.advantages.over_time import discounted_sum, next_valid, reward_to_go
from verl.trainer.ppo.core_algos.registry import register_adv_est
from verl.utils.torch_functional import masked_whiten, zero_masked


@register_adv_est(
    "gae",
    paper="https://arxiv.org/abs/1506.02438",
    reproduces={
        "PPO (arXiv:1707.06347)": ("algorithm.adv_estimator=gae", "algorithm.gamma=0.99", "algorithm.lam=0.95"),
        "PPO for reasoning (arXiv:2503.24290)": (
            "algorithm.adv_estimator=gae", "algorithm.gamma=1.0", "algorithm.lam=1.0",
        ),
    },
)  # fmt: skip
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation.

        δ_t = r_t + γ V_{t+1} - V_t        A_t = δ_t + γλ A_{t+1}        returns = A + V

    where t+1 is the next valid token: masked tokens (tool outputs) are skipped. The advantages are
    whitened over the batch afterwards; the returns are not.

    Args:
        token_level_rewards: (bsz, response_length).
        values: (bsz, response_length) V_t, of the state before token t.
        response_mask: (bsz, response_length) 1 on tokens the policy chose.
        gamma: γ.
        lam: λ; 1 is Monte Carlo minus V, 0 is one-step temporal difference.

    Returns:
        whitened advantages, and returns.
    """
    values = zero_masked(values, response_mask)
    rewards = zero_masked(token_level_rewards, response_mask)
    deltas = rewards + gamma * next_valid(values, response_mask) - values
    advantages = zero_masked(discounted_sum(deltas, response_mask, gamma * lam), response_mask)
    return masked_whiten(advantages, response_mask), advantages + values


@register_adv_est(
    "reinforce_plus_plus",
    paper="https://arxiv.org/abs/2501.03262",
    reproduces={
        "REINFORCE++": (
            "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=1.0", "algorithm.use_kl_in_reward=true",
            "algorithm.kl_penalty=kl",
        )
    },
)  # fmt: skip
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """REINFORCE with discounted returns, whitened over the batch.

        G_t = r_t + γ G_{t+1}        A = whiten(G)

    where t+1 is the next valid token: masked tokens (tool outputs) carry G through, so a reward at
    the end reaches every turn. Some releases of verl reset G there and lose it.

    Args:
        token_level_rewards: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens the policy chose.
        gamma: γ.

    Returns:
        advantages A and returns G.
    """
    returns = zero_masked(discounted_sum(token_level_rewards, response_mask, gamma), response_mask)
    return masked_whiten(returns, response_mask), returns


@register_adv_est(
    "remax",
    paper="https://arxiv.org/abs/2310.10505",
    reproduces={"ReMax": ("algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=true")},
)
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Reward to go, against the reward of the greedy response to the same prompt.

        G_t = Σ_{s≥t} r_s        A_t = G_t - b

    Args:
        token_level_rewards: (bsz, response_length).
        reward_baselines: (bsz,) b, the summed reward of the greedy response.
        response_mask: (bsz, response_length) 1 on tokens the policy chose.

    Returns:
        advantages A and returns G.
    """
    returns = reward_to_go(token_level_rewards, response_mask)
    return zero_masked(returns - reward_baselines.unsqueeze(-1), response_mask), returns
