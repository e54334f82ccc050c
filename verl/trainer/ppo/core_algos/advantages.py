"""Advantage estimators: rewards in, advantages and returns out, both (bsz, response_length) and 0 off the mask.

Conventions: r are ``token_level_rewards``, m the ``response_mask``, R_i = Σ_t r_{i,t}·m_{i,t}. What any
column holds at a masked place is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.core_algos.registry import register_adv_est
from verl.utils.torch_functional import masked_sum, masked_whiten, zero_masked

GroupIds = np.ndarray | Tensor | Sequence
"""(bsz,) one id per sample; equal ids are siblings, responses to one prompt."""


# ---- helpers ----------------------------------------------------------------------------------


def discounted_sum(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor · y_{t+1} on valid tokens; masked tokens carry y_{t+1} through unchanged.

    So time stands still over tool outputs and padding: tokens before them see what comes after
    them as if they were not there.

    Args:
        x: (bsz, response_length), 0 at masked places.
        mask: (bsz, response_length).
        factor: the discount.

    Returns:
        (bsz, response_length), carried values included.
    """
    valid, running = mask.bool(), x.new_zeros(x.shape[0])
    columns = []
    for t in reversed(range(x.shape[1])):
        running = torch.where(valid[:, t], x[:, t] + factor * running, running)
        columns.append(running)
    return torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(x)


def next_valid(values: Tensor, mask: Tensor) -> Tensor:
    """For each token the value at the next valid token after it; 0 after the last.

    Args:
        values: (bsz, response_length).
        mask: (bsz, response_length).
    """
    width = values.shape[1]
    position = torch.arange(width, device=values.device).expand_as(values)
    position = torch.where(mask.bool(), position, width)
    after = torch.nn.functional.pad(position[:, 1:], (0, 1), value=width)
    nearest = after.flip(-1).cummin(-1).values.flip(-1)  # (bsz, response_length), width where none follows
    padded = torch.nn.functional.pad(zero_masked(values, mask), (0, 1))
    return padded.gather(-1, nearest)


def group_numbers(index: GroupIds, device: torch.device | None = None) -> Tensor:
    """Group ids of any hashable kind as 0, 1, 2, ... in order of appearance; (bsz,) int64."""
    seen: dict = {}
    ids = index if isinstance(index, Sequence) else index.tolist()
    return torch.tensor([seen.setdefault(group, len(seen)) for group in ids], dtype=torch.int64, device=device)


def group_mean_std(scores: Tensor, index: GroupIds) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation (unbiased) and size of each sample's group.

    The sums run in float64, so equal scores give a deviation of exactly 0. A group of one has
    deviation 0.

    Args:
        scores: (bsz,).
        index: (bsz,) group ids.

    Returns:
        three (bsz,) tensors, in the dtype of ``scores``.
    """
    group = group_numbers(index, scores.device)
    wide = scores.double()
    groups = int(group.max()) + 1 if len(group) else 0
    size = torch.bincount(group, minlength=groups).double()
    mean = wide.new_zeros(groups).index_add(0, group, wide) / size
    squares = wide.new_zeros(groups).index_add(0, group, (wide - mean[group]) ** 2)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return mean[group].to(scores.dtype), std[group].to(scores.dtype), size[group].to(scores.dtype)


def broadcast(scores: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """A score per response on each of its valid tokens, as advantages and as returns."""
    advantages = zero_masked(scores.unsqueeze(-1).expand(response_mask.shape), response_mask)
    return advantages, advantages.clone()


# ---- estimators -------------------------------------------------------------------------------


@register_adv_est("gae", paper="https://arxiv.org/abs/1506.02438")
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


@register_adv_est("grpo", paper="https://arxiv.org/abs/2402.03300")
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage: each response against its siblings.

        A_i = (R_i - mean_g R) / (std_g R + ε)

    With ``norm_adv_by_std_in_grpo=False`` the denominator is 1 (Dr. GRPO, arXiv:2503.20783). The
    deviation is the unbiased one. A group of one has no baseline: mean 0 and deviation 1, so its
    advantage is its own reward over 1 + ε.

    Args:
        token_level_rewards: (bsz, response_length); outcome rewards sit on one token.
        response_mask: (bsz, response_length) 1 on tokens the policy chose.
        index: (bsz,) group id; equal ids are siblings.
        epsilon: ε.
        norm_adv_by_std_in_grpo: divide by the deviation.

    Returns:
        advantages and returns, equal on every valid token of a response.
    """
    rewards = masked_sum(token_level_rewards, response_mask, axis=-1)  # (bsz,)
    mean, std, size = group_mean_std(rewards, index)
    alone = size == 1
    centred = rewards - mean.masked_fill(alone, 0.0)
    if norm_adv_by_std_in_grpo:
        centred = centred / (std.masked_fill(alone, 1.0) + epsilon)
    return broadcast(centred, response_mask)


@register_adv_est("rloo", paper="https://arxiv.org/abs/2402.14740")
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: GroupIds
) -> tuple[Tensor, Tensor]:
    """Leave-one-out: each response against the mean of its siblings without it.

        A_i = R_i - (1/(n-1)) Σ_{j≠i} R_j = (R_i - mean_g R) · n / (n - 1)

    A group of one has no siblings: its advantage is its own reward.

    Args:
        token_level_rewards: (bsz, response_length); outcome rewards sit on one token.
        response_mask: (bsz, response_length) 1 on tokens the policy chose.
        index: (bsz,) group id; equal ids are siblings.

    Returns:
        advantages and returns, equal on every valid token of a response.
    """
    rewards = masked_sum(token_level_rewards, response_mask, axis=-1)  # (bsz,)
    mean, _, size = group_mean_std(rewards, index)
    left_out = (rewards - mean) * size / (size - 1).clamp(min=1)
    return broadcast(torch.where(size == 1, rewards, left_out), response_mask)


@register_adv_est("reinforce_plus_plus", paper="https://arxiv.org/abs/2501.03262")
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
    rewards = zero_masked(token_level_rewards, response_mask)
    returns = zero_masked(discounted_sum(rewards, response_mask, gamma), response_mask)
    return masked_whiten(returns, response_mask), returns


@register_adv_est("remax", paper="https://arxiv.org/abs/2310.10505")
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
    rewards = zero_masked(token_level_rewards, response_mask)
    returns = zero_masked(rewards.flip(-1).cumsum(-1).flip(-1), response_mask)
    return zero_masked(returns - reward_baselines.unsqueeze(-1), response_mask), returns
