"""Estimators that compare siblings at the same token, or at the same turn."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.core_algos.advantages.group_baselines import group_relative
from verl.trainer.ppo.core_algos.advantages.grouping import GroupIds, Groups
from verl.trainer.ppo.core_algos.advantages.over_time import discounted_sum, reward_to_go
from verl.trainer.ppo.core_algos.registry import register_adv_est
from verl.utils.torch_functional import zero_masked

OTB = "https://verl.readthedocs.io/en/latest/algo/otb.html"


@register_adv_est(
    "optimal_token_baseline",
    paper=OTB,
    reproduces={
        "OTB": (
            "algorithm.adv_estimator=optimal_token_baseline", "actor_rollout_ref.actor.calculate_sum_pi_squared=true",
        )
    },
)  # fmt: skip
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """The baseline of least variance at each token: siblings weighed by the gradient they have gathered so far.

        w_t = 1 - 2π_t + Σ_v π_t(v)²        W_t = Σ_{s≤t} w_s        B_t = Σ_j G_{j,t} W_{j,t} / (Σ_j W_{j,t} + ε)

        A_t = G_t - B_t        G_t = Σ_{s≥t} r_s

    over the siblings j that have a token of the policy at t. w_t = ‖onehot - π_t‖² is the squared norm of
    the gradient of log π_t in the logits. Truncated importance weights ρ scale that gradient:
    w_t becomes ρ_t² w_t.

    Where no sibling has a token at t, as in a group of one and beyond the end of the second longest
    response, the only return there is would be its own baseline. It is compared with nothing
    (B_t = 0) instead; verl 0.8 leaves those tokens an advantage of nearly 0, except in a group of one.

    Args:
        token_level_rewards: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens the policy chose.
        index: (bsz,) group id; equal ids are siblings.
        old_log_probs: (bsz, response_length) log π_t.
        sum_pi_squared: (bsz, response_length) Σ_v π_t(v)².
        rollout_is_weights: (bsz, response_length) ρ, if rollout correction makes them.
        handle_zero_tail: if false, only a group of one has B_t = 0, as in verl 0.8.
        epsilon: ε.

    Returns:
        advantages A and returns G.
    """
    returns = reward_to_go(token_level_rewards, response_mask)
    gradient = 1 - 2 * zero_masked(old_log_probs, response_mask).exp() + sum_pi_squared
    if rollout_is_weights is not None:
        gradient = gradient * rollout_is_weights**2
    valid = response_mask.bool()
    weight = zero_masked(zero_masked(gradient, valid).cumsum(-1, dtype=torch.float64), valid)
    groups = Groups.of(index, valid)
    baseline = groups.sums(returns * weight) / (groups.sums(weight) + epsilon)  # (groups, response_length)
    siblings = groups.sums(valid) if handle_zero_tail else groups.sums(groups.is_member).unsqueeze(-1)
    baseline = baseline.masked_fill(siblings <= 1, 0.0)
    return zero_masked((returns - baseline[groups.number]).to(returns.dtype), valid), returns


@register_adv_est(
    "tir_optimal_token_baseline",
    paper=OTB,
    reproduces={
        "OTB with tools": (
            "algorithm.adv_estimator=tir_optimal_token_baseline",
            "actor_rollout_ref.actor.calculate_sum_pi_squared=true",
        )
    },
)  # fmt: skip
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """The optimal token baseline where tools speak in between: siblings are compared at the policy's n-th token.

    It is ``optimal_token_baseline`` on responses from which all masked tokens
    have been taken out, so that the length of a tool's output moves no token to other siblings.

    Args:
        token_level_rewards: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens the policy chose.
        index: (bsz,) group id; equal ids are siblings.
        old_log_probs: (bsz, response_length) log π_t.
        sum_pi_squared: (bsz, response_length) Σ_v π_t(v)².
        rollout_is_weights: (bsz, response_length) ρ, if rollout correction makes them.
        epsilon: ε.

    Returns:
        advantages A and returns G, in the places of the tokens.
    """
    valid, width = response_mask.bool(), response_mask.shape[1]
    place = valid.cumsum(-1) - 1
    target = torch.where(valid, place, width)  # masked tokens go to a column that is cut off

    def squeezed(column: Tensor) -> Tensor:
        out = torch.zeros(len(column), width + 1, dtype=column.dtype, device=column.device)
        return out.scatter_(1, target, column)[:, :width]

    weights = None if rollout_is_weights is None else squeezed(rollout_is_weights)
    found = compute_optimal_token_baseline_advantage(
        squeezed(token_level_rewards), squeezed(valid), index, squeezed(old_log_probs), squeezed(sum_pi_squared),
        weights, epsilon=epsilon,
    )  # fmt: skip
    advantages, returns = (zero_masked(column.gather(1, place.clamp(min=0)), valid) for column in found)
    return advantages, returns


@register_adv_est(
    "grpo_per_turn",
    paper="https://arxiv.org/abs/2505.11821",
    reproduces={"credit per turn": ("algorithm.adv_estimator=grpo_per_turn", "algorithm.gamma=1.0")},
)
def compute_grpo_per_turn_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    gamma: float,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage of every turn: what comes after it, against siblings at the same turn.

        G_k = R_k + γ G_{k+1}        A_k = (G_k - mean_g G_k) / (std_g G_k + ε)

    A turn is a run of tokens of the policy, between tool outputs or users' answers; R_k is the sum of
    the rewards on its tokens. Mean and deviation are over the siblings that have a k-th turn; where
    there is none, the baseline is 0 and the scale 1. With a single turn it is ``grpo``.

    MT-GRPO (arXiv:2505.11821) normalises the rewards of a turn and of the outcome apart and adds them;
    here they are added first, which holds for any number of turns.

    Args:
        token_level_rewards: (bsz, response_length); a turn's reward sits on its last token.
        response_mask: (bsz, response_length) 1 on tokens the policy chose.
        index: (bsz,) group id; equal ids are siblings.
        gamma: γ, per turn.
        epsilon: ε.
        norm_adv_by_std_in_grpo: divide by the deviation.

    Returns:
        advantages and returns, equal on every token of a turn.
    """
    valid = response_mask.bool()
    starts = valid & ~torch.nn.functional.pad(valid[:, :-1], (1, 0))
    turn = starts.cumsum(-1) - 1  # (bsz, response_length), right on valid tokens
    turns = max(int(starts.sum(-1).max()), 1) if starts.numel() else 1
    number = torch.arange(turns, device=valid.device)
    has_turn = number < starts.sum(-1, keepdim=True)  # (bsz, turns)
    kept = zero_masked(token_level_rewards.to(torch.promote_types(token_level_rewards.dtype, torch.float32)), valid)
    rewards = torch.zeros(has_turn.shape, dtype=kept.dtype, device=kept.device)
    rewards = rewards.scatter_add(1, turn.clamp(min=0), kept)
    returns = zero_masked(discounted_sum(rewards, has_turn, gamma), has_turn)
    rows = Groups.of(index, valid)
    groups = Groups((rows.number.unsqueeze(-1) * turns + number).flatten(), has_turn.flatten(), rows.groups * turns)
    scores = group_relative(returns.flatten(), groups, epsilon, norm_adv_by_std_in_grpo).view(has_turn.shape)
    advantages = zero_masked(scores.to(rewards.dtype).gather(1, turn.clamp(min=0)), valid)
    return advantages, advantages.clone()
