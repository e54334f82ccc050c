"""Advantage estimators that compare the total reward of a response with those of its siblings.

R_i = Σ_t r_{i,t}·m_{i,t} with r the ``token_level_rewards`` and m the ``response_mask``, both (bsz, response_length),
m 1 on tokens that the policy chose. Siblings have the same id in ``index``, (bsz,); mean_g and std_g are over them,
the standard deviation unbiased. A group of one has no comparison: its baseline is 0 and its scale 1. A response
without a token of the policy belongs to no group (see :class:`Groups`). A reward that differs from the mean by rounding
alone is equal to it (:func:`~verl.algorithms.groups.rewards_of_responses`). ``epsilon`` is ε, and
``norm_adv_by_std_in_grpo=False`` omits the division by the standard deviation.

Each returns advantages and returns, both (bsz, response_length), equal on every valid token of a response and 0 off
the mask. Values at masked positions are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.estimator_registry import register_adv_est, with_public_arguments
from verl.algorithms.groups import GroupIds, Groups, rewards_of_responses, rounding_unit
from verl.errors import ConfigError, RewardError, SchemaError
from verl.schema import require
from verl.utils.torch_functional import masked_whiten, zero_masked


def broadcast(scores: Tensor, response_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Repeat a score per response, (bsz,), on each of its valid tokens, as advantages and as returns.

    ``dtype`` is that of the rewards; the result has it too, but at least float32.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    advantages = zero_masked(scores.to(dtype).unsqueeze(-1).expand(response_mask.shape), response_mask)
    return advantages, advantages.clone()


def group_relative(rewards: Tensor, rounding: Tensor, groups: Groups, epsilon: float, by_std: bool) -> Tensor:
    """(R - mean_g) / (std_g + ε), or without the denominator; (bsz,) float64. ``rounding`` is that of R."""
    centred = groups.centred(rewards, rounding)
    return centred / (groups.std(rewards).masked_fill(groups.is_alone, 1.0) + epsilon) if by_std else centred


@register_adv_est(
    "grpo",
    paper="https://arxiv.org/abs/2402.03300",
    aliases=("grpo_vectorized",),
    reproduces={
        "GRPO": (
            "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=64", "data.max_response_length=1024",
            "actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.kl_loss_coef=0.04", "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        ),
        "Dr. GRPO (arXiv:2503.20783)": (
            "algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=false",
            "actor_rollout_ref.actor.use_kl_loss=false",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        ),
    },
)  # fmt: skip
@with_public_arguments
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage: the reward of a response, normalised within its group.

        A_i = (R_i - mean_g R) / (std_g R + ε)

    With ``norm_adv_by_std_in_grpo=False`` the denominator is 1 (Dr. GRPO, arXiv:2503.20783).
    """
    groups, rewards = Groups.from_ids(index, response_mask), rewards_of_responses(token_level_rewards, response_mask)
    scores = group_relative(*rewards, groups, epsilon, norm_adv_by_std_in_grpo)
    return broadcast(scores, response_mask, token_level_rewards.dtype)


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
"""Another name of :func:`compute_grpo_outcome_advantage`."""


@register_adv_est(
    "rloo",
    paper="https://arxiv.org/abs/2402.14740",
    aliases=("rloo_vectorized",),
    reproduces={
        "RLOO": ("algorithm.adv_estimator=rloo", "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=kl"),
    },
)
@with_public_arguments
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIds
) -> tuple[Tensor, Tensor]:
    """Leave-one-out: the reward of a response minus the mean of its siblings.

        A_i = R_i - (1/(n-1)) Σ_{j≠i} R_j = (R_i - mean_g R) · n / (n - 1)

    The baseline of a group of one is 0.
    """
    groups = Groups.from_ids(index, response_mask)
    centred = groups.centred(*rewards_of_responses(token_level_rewards, response_mask))
    left_out = centred * torch.where(groups.is_alone, 1.0, groups.size / (groups.size - 1))
    return broadcast(left_out, response_mask, token_level_rewards.dtype)


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage
"""Another name of :func:`compute_rloo_outcome_advantage`."""


@register_adv_est(
    "grpo_passk",
    paper="https://arxiv.org/abs/2503.19595",
    reproduces={"pass@k": ("algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=false")},
)
@with_public_arguments
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Reward for the best of k: only the best response of a group has an advantage, its lead over the second best.

        A_i = (R_i - max_{j≠i} R_j) / (std_g R + ε) for the best i, 0 for the others

    The numerator is what the group's maximum would lose without i, so it is 0 for all if several are best. With
    ``norm_adv_by_std_in_grpo=False`` the denominator is 1.
    """
    groups = Groups.from_ids(index, response_mask)
    rewards, rounding = rewards_of_responses(token_level_rewards, response_mask)
    best = groups.largest(rewards)
    is_best = rewards + rounding >= groups.largest(rewards - rounding)
    second = groups.largest(rewards.masked_fill(is_best, -torch.inf))
    is_unique = is_best & (groups.total(is_best) == 1)
    lead = best - second.masked_fill(groups.is_alone, 0.0)
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.std(rewards).masked_fill(groups.is_alone, 1.0) + epsilon)
    return broadcast(torch.where(is_unique, lead, 0.0), response_mask, token_level_rewards.dtype)


@register_adv_est(
    "reinforce_plus_plus_baseline",
    paper="https://arxiv.org/abs/2501.03262",
    reproduces={
        "REINFORCE++-baseline": (
            "algorithm.adv_estimator=reinforce_plus_plus_baseline", "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.kl_loss_type=k2",
        )
    },
)  # fmt: skip
@with_public_arguments
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIds
) -> tuple[Tensor, Tensor]:
    """The group's mean as baseline, the batch's standard deviation as scale.

        A = whiten(R_i - mean_g R)

    over all tokens of the batch, so long responses weigh more in its mean and deviation.
    """
    groups = Groups.from_ids(index, response_mask)
    centred = groups.centred(*rewards_of_responses(token_level_rewards, response_mask))
    return _whitened(centred, response_mask, token_level_rewards.dtype)


@register_adv_est(
    "opo",
    paper="https://arxiv.org/abs/2505.23585",
    reproduces={
        "OPO": (
            "algorithm.adv_estimator=opo", "actor_rollout_ref.actor.use_kl_loss=false",
            "actor_rollout_ref.actor.entropy_coeff=0.0", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
        )
    },
)  # fmt: skip
@with_public_arguments
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIds
) -> tuple[Tensor, Tensor]:
    """The baseline of least variance, if the squared gradient norm of a response is proportional to its length.

        A_i = R_i - Σ_j |y_j| R_j / Σ_j |y_j|        |y| tokens of the policy, sums over the siblings

    The baseline of a group of one is 0.
    """
    groups, lengths = Groups.from_ids(index, response_mask), response_mask.bool().sum(-1).double()
    centred = groups.centred(*rewards_of_responses(token_level_rewards, response_mask), weight=lengths)
    return broadcast(centred, response_mask, token_level_rewards.dtype)


@register_adv_est(
    "gpg",
    paper="https://arxiv.org/abs/2504.02546",
    reproduces={
        "GPG": (
            "algorithm.adv_estimator=gpg", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
            "actor_rollout_ref.actor.use_kl_loss=false",
        )
    },
)  # fmt: skip
@with_public_arguments
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIds, f_norm: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The group's mean as baseline, scaled up to make up for responses without a reward.

        A_i = α (R_i - mean_g R) / f_norm        α = rows / rows with R ≠ 0

    α is that of verl; the paper's is rows / rows with a gradient, which excludes every group with equal rewards. If no
    row has a reward every advantage is 0. ``f_norm`` is a constant scale.
    """
    groups = Groups.from_ids(index, response_mask)
    rewards, rounding = rewards_of_responses(token_level_rewards, response_mask)  # 0 in rows without tokens
    alpha = groups.is_member.sum() / rewards.count_nonzero().clamp(min=1)
    centred = groups.centred(rewards, rounding)
    return broadcast(alpha * centred / f_norm, response_mask, token_level_rewards.dtype)


@register_adv_est(
    "maxrl",
    paper="https://arxiv.org/abs/2602.02710",
    no_kl_in_reward="it divides by the mean reward of a group, which has to be a rate of success",
    reproduces={"MaxRL": ("algorithm.adv_estimator=maxrl", "actor_rollout_ref.actor.use_kl_loss=false")},
)
@with_public_arguments
def compute_maxrl_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIds
) -> tuple[Tensor, Tensor]:
    """Maximum-likelihood RL: the advantage relative to the success rate, so rare successes count more.

        A_i = (R_i - mean_g R) / mean_g R, 0 where the mean is 0

    For rewards of 0 and 1 the mean estimates the success rate p, and (R - p)/p estimates ∇ log p where ``grpo`` without
    deviation estimates ∇ p.

    Raises:
        RewardError: a reward is negative: the mean is then no success rate, and dividing by it could change every sign.
    """
    groups = Groups.from_ids(index, response_mask)
    rewards, rounding = rewards_of_responses(token_level_rewards, response_mask)
    if (negative := rewards < 0).any():
        row = int(negative.nonzero()[0])
        raise RewardError(
            f"maxrl divides by the mean reward of a group, so rewards must be 0 or more; row {row} has "
            f"{float(rewards[row]):g}. Score failure as 0 and success as 1 (a scorer that gives -1 and 1: "
            "(score + 1) / 2), without a KL penalty in the rewards; or use the estimator grpo."
        )
    mean = groups.mean(rewards)
    scores = torch.where(mean > 0, groups.centred(rewards, rounding) / mean, 0.0)
    return broadcast(torch.where(groups.is_alone, rewards, scores), response_mask, token_level_rewards.dtype)


@register_adv_est(
    "gdpo",
    paper="https://arxiv.org/abs/2601.05242",
    no_kl_in_reward="it reads the components of the reward, which hold no KL",
    reproduces={
        "GDPO": (
            "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[accuracy,format]",
            "algorithm.gdpo_reward_weights=[1.0,1.0]",
        )
    },
)  # fmt: skip
@with_public_arguments
def compute_gdpo_outcome_advantage(
    response_mask: Tensor,
    index: GroupIds,
    gdpo_reward_keys: Sequence[str] | None = None,
    gdpo_reward_weights: Sequence[float] | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **columns: Any,
) -> tuple[Tensor, Tensor]:
    """Each component of the reward normalised within its group, then weighted, summed and whitened.

        A_i = whiten(Σ_k w_k · (r_{k,i} - mean_g r_k) / (std_g r_k + ε))

    So a component of small spread is not dominated by one of large spread, as happens when the sum is normalised.

    ``gdpo_reward_keys`` are keys of the dict that the reward function returns, ``gdpo_reward_weights`` the w_k; None is
    1 for all.

    Raises:
        ConfigError: no keys, or another number of weights.
        SchemaError: the batch lacks a component, or a sample that is trained on has no number for it.
    """
    weights = _gdpo_weights(gdpo_reward_keys, gdpo_reward_weights)
    require(columns, weights, "advantage estimator 'gdpo' (gdpo_reward_keys)")
    groups = Groups.from_ids(index, response_mask)
    scores = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    for key, weight in weights.items():
        component = _component(key, columns[key], groups.is_member)
        rounding = rounding_unit(torch.float32) * component.abs()
        scores += weight * group_relative(component, rounding, groups, epsilon, norm_adv_by_std_in_grpo)
    return _whitened(scores, response_mask, torch.float32)


def _gdpo_weights(keys: Sequence[str] | None, weights: Sequence[float] | None) -> Mapping[str, float]:
    if not keys:
        raise ConfigError(
            "the estimator gdpo compares components of the reward, and gdpo_reward_keys names none. Name keys of the "
            "dict that the reward function returns, e.g. gdpo_reward_keys=[accuracy,format]."
        )
    if weights is not None and len(weights) != len(keys):
        raise ConfigError(
            f"gdpo_reward_weights has {len(weights)} numbers for the {len(keys)} components {', '.join(keys)}. Give "
            "each of gdpo_reward_keys one, or leave the weights out (null)."
        )
    return dict(zip(keys, weights or [1.0] * len(keys), strict=True))


def _component(key: str, values: np.ndarray | Tensor, is_member: Tensor) -> Tensor:
    """One component, (bsz,) float64; 0 for rows that do not count."""
    numbers = torch.tensor([_number(value) for value in values], dtype=torch.float64, device=is_member.device)
    if (bad := is_member & ~numbers.isfinite()).any():
        row = int(bad.nonzero()[0])
        raise SchemaError(
            f"component '{key}' of the reward (gdpo_reward_keys) is {values[row]!r} in row {row}; it should be "
            "a finite number. The reward function must return this key, with a number, for every sample."
        )
    return zero_masked(numbers, is_member)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


@register_adv_est(
    "hierarchical_grpo",
    paper="https://docs.primeintellect.ai/prime-rl/algorithms",
    reproduces={
        "Hierarchical GRPO": (
            "algorithm.adv_estimator=hierarchical_grpo", "algorithm.episode_agents=[solver]",
            "algorithm.norm_adv_by_std_in_grpo=false",
        )
    },
)  # fmt: skip
@with_public_arguments
def compute_hierarchical_grpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    trajectory_id: np.ndarray,
    agent: np.ndarray,
    episode_agents: Sequence[str] | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage where some agents propose problems to others: solvers are compared on one problem.

        A_i = (R_i - mean_g R) / (std_g R + ε)

    The group of an agent of ``episode_agents`` is its kind within one trajectory, such as all ``solver/1``,
    ``solver/2``, ... of the problem that was proposed there; that of another agent is the same agent in the
    trajectories of the prompt (``index``), as in ``grpo``.

    R is the reward of the agent: what its turns got, and the score of the trajectory, which all of its agents share.
    """
    ids = index.tolist() if isinstance(index, (np.ndarray, Tensor)) else list(index)
    kinds, inside = [str(name).partition("/")[0] for name in agent], set(episode_agents or ())
    compared = [
        (trajectory, kind) if kind in inside else group
        for group, trajectory, kind in zip(ids, trajectory_id, kinds, strict=True)
    ]
    groups, rewards = Groups.from_ids(compared, response_mask), rewards_of_responses(token_level_rewards, response_mask)
    scores = group_relative(*rewards, groups, epsilon, norm_adv_by_std_in_grpo)
    return broadcast(scores, response_mask, token_level_rewards.dtype)


@register_adv_est(
    "rae",
    paper="https://arxiv.org/abs/2506.24119",
    reproduces={"RAE (arXiv:2506.24119)": ("algorithm.adv_estimator=rae", "algorithm.rae_decay=0.95")},
)
@with_public_arguments
def compute_rae_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, role_baselines: Tensor
) -> tuple[Tensor, Tensor]:
    """Role-conditioned advantage: the reward of an agent minus the running mean of the rewards in its role.

        A_i = R_i - b_role        then for each reward: b ← α b + (1 - α) R        b = 0 at the start

    For games in which one side's reward is the other's loss, so that a mean over both would say nothing.
    ``role_baselines`` are the b before this batch, (bsz,), which the trainer keeps for each ``data_source`` and agent
    (:class:`RoleBaselines`); α is ``rae_decay``. It needs no siblings.

    Paper: SPIRAL, https://arxiv.org/abs/2506.24119. Here the baseline is that before the batch, so that it does not
    depend on the response.
    """
    rewards, rounding = rewards_of_responses(token_level_rewards, response_mask)
    baselines = role_baselines.double()
    rounding = rounding + rounding_unit(torch.float32) * baselines.abs()
    scores = (rewards - baselines).masked_fill((rewards - baselines).abs() <= rounding, 0.0)
    return broadcast(scores, response_mask, token_level_rewards.dtype)


class RoleBaselines:
    """The running mean of the rewards in each role, for the estimator ``rae``.

    Args:
        decay: α, the part of the mean that stays with a further reward.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.values: dict[str, float] = {}

    def before(self, roles: Sequence[str]) -> Tensor:
        """Return the mean of each role, (n,) float32; 0 for a role without rewards."""
        return torch.tensor([self.values.get(role, 0.0) for role in roles], dtype=torch.float32)

    def count(self, roles: Sequence[str], rewards: Sequence[float]) -> None:
        """Count rewards, one after the other."""
        for role, reward in zip(roles, rewards, strict=True):
            self.values[role] = self.decay * self.values.get(role, 0.0) + (1 - self.decay) * float(reward)

    def state_dict(self) -> dict[str, float]:
        """Return the state to checkpoint."""
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.values = dict(state)


def _whitened(scores: Tensor, response_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    advantages, _ = broadcast(scores, response_mask, dtype)
    advantages = masked_whiten(advantages, response_mask)
    return advantages, advantages.clone()
