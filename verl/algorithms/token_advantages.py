"""Advantage estimators with a separate advantage for each token or turn of a response.

``token_level_rewards`` r, ``values`` V (of the state before each token) and ``response_mask`` (1 on tokens that the
policy chose) are (bsz, response_length); ``gamma`` is γ, ``lam`` λ, ``epsilon`` ε. Siblings have the same id in
``index``, (bsz,). Masked tokens (tool outputs, padding) are not time steps: t + 1 is the next valid token, so sums and
discounts continue across them.

A turn is a contiguous run of tokens of the policy, between tool outputs or users' answers. ``high_level_gamma`` Γ is
the discount from the last token of a turn to the first of the next; None is γ there too. With γ = 1 and Γ < 1, what
lies two turns ahead counts Γ² whatever the number of tokens.

Sums are in float64; what differs from a mean by rounding of the rewards alone is equal to it
(:func:`~verl.algorithms.groups.rewards_of_responses`).

Each returns advantages A and returns G, both (bsz, response_length) and 0 off the mask. Values at masked positions are
ignored.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.estimator_registry import register_adv_est, with_public_arguments
from verl.algorithms.groups import GroupIds, Groups, group_numbers, rewards_of_responses, rounding_unit
from verl.algorithms.response_advantages import group_relative
from verl.base.types import JsonMapping
from verl.errors import SchemaError, UnsupportedError
from verl.utils.torch_functional import masked_whiten, zero_masked
from verl.vision.messages import has_image_parts

# ---- sums along a response ---------------------------------------------------------------------


def discounted_sum(x: Tensor, mask: Tensor, factor: float | Tensor) -> Tensor:
    """y_t = x_t + factor_t · y_{t+1} on valid tokens; masked tokens repeat y_{t+1}. All (bsz, response_length)."""
    valid, x = mask.bool(), x.to(torch.promote_types(x.dtype, torch.float32))
    return _backwards(zero_masked(x, valid), torch.where(valid, factor, torch.ones_like(x)))


def turn_ends(mask: Tensor) -> Tensor:
    """Return whether a token is the last of a turn; (bsz, response_length) bool."""
    valid = mask.bool()
    return valid & ~torch.nn.functional.pad(valid[:, 1:], (0, 1))[:, : valid.shape[1]]


def discounts(mask: Tensor, gamma: float, high_level_gamma: float | None) -> float | Tensor:
    """γ_t from a token to the next: Γ at the last token of a turn, else γ; a number if they are the same."""
    if high_level_gamma is None or high_level_gamma == gamma:
        return gamma
    inside = torch.full(mask.shape, gamma, dtype=torch.float32, device=mask.device)
    return inside.masked_fill_(turn_ends(mask), high_level_gamma)


def next_valid(values: Tensor, mask: Tensor) -> Tensor:
    """For each token the value at the next valid token; 0 after the last. All (bsz, response_length)."""
    valid = mask.bool()
    nearest = _backwards(zero_masked(values, valid), (~valid).to(values.dtype))
    return torch.nn.functional.pad(nearest[:, 1:], (0, 1))[:, : values.shape[1]]


def reward_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """G_t = Σ_{s≥t} r_s over valid tokens, 0 at masked ones; both (bsz, response_length)."""
    valid_rewards = zero_masked(rewards.to(torch.promote_types(rewards.dtype, torch.float32)), mask)
    return zero_masked(valid_rewards.flip(-1).cumsum(-1).flip(-1), mask)


def _backwards(x: Tensor, keep: Tensor) -> Tensor:
    """y_t = x_t + keep_t · y_{t+1}, with one fused operation on all rows per token."""
    # Transposed, so that each step reads and writes contiguous memory.
    y = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device)  # (response_length, bsz)
    after = x.new_zeros(x.shape[0])
    columns = zip(x.t().contiguous().unbind(), keep.t().contiguous().unbind(), y.unbind(), strict=True)
    for here, factor, out in reversed(list(columns)):
        after = torch.addcmul(here, factor, after, out=out)
    return y.t().contiguous()


# ---- one response ------------------------------------------------------------------------------


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
@with_public_arguments
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    high_level_gamma: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation.

        δ_t = r_t + γ_t V_{t+1} - V_t        A_t = δ_t + γ_t λ A_{t+1}        returns = A + V

    where t+1 is the next valid token: masked tokens (tool outputs) are skipped. γ_t is γ, and Γ
    (``high_level_gamma``) at the last token of a turn. The advantages are then whitened over the batch; the returns
    are not.
    """
    gamma_t = discounts(response_mask, gamma, high_level_gamma)
    deltas = _td_errors(token_level_rewards, values, response_mask, gamma_t)
    advantages = zero_masked(discounted_sum(deltas, response_mask, gamma_t * lam), response_mask)
    whitened = _whitened(advantages, response_mask, token_level_rewards)
    return _as_given((whitened, advantages + zero_masked(values, response_mask)), token_level_rewards, values)


def _whitened(sums: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
    """Whiten discounted sums of rewards, (bsz, response_length); 0 if they differ by rounding of the rewards alone."""
    _, rounding = rewards_of_responses(rewards, mask)  # of undiscounted sums, the largest
    return masked_whiten(sums, mask, rounding=rounding.max() if len(rounding) else 0.0)


def _as_given(results: tuple[Tensor, Tensor], *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return both results, which are float64, in the dtype of the given columns, and at least float32."""
    dtype = functools.reduce(torch.promote_types, (column.dtype for column in inputs), torch.float32)
    first, second = results
    return first.to(dtype), second.to(dtype)


def _td_errors(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float | Tensor) -> Tensor:
    """δ_t = r_t + γ_t V_{t+1} - V_t of valid tokens, with t+1 the next valid one; 0 for others. In float64."""
    values = zero_masked(values, mask).double()
    return zero_masked(rewards, mask).double() + zero_masked(gamma * next_valid(values, mask), mask) - values


@register_adv_est(
    "bi_level_gae",
    paper="https://arxiv.org/abs/2510.16907",
    reproduces={
        "VAGEN": (
            "algorithm.adv_estimator=bi_level_gae", "algorithm.gamma=1.0", "algorithm.lam=1.0",
            "algorithm.high_level_gamma=0.95",
        ),
    },
)  # fmt: skip
@with_public_arguments
def compute_bi_level_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    high_level_gamma: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over turns, then over the tokens of each turn.

    With e_k the last token of turn k, first the turns, from one last token to the next::

        δ_{e_k} = r_{e_k} + Γ V_{e_{k+1}} - V_{e_k}        A_{e_k} = δ_{e_k} + Γλ A_{e_{k+1}}

    then the tokens before it, which inherit the advantage of their turn::

        δ_t = r_t + γ V_{t+1} - V_t        A_t = δ_t + γλ A_{t+1}        returns = A + V

    So λ < 1 weakens credit within a turn, and once from each turn to the next. The advantages are then whitened over
    the batch. With a single turn it is ``gae``.
    """
    high = gamma if high_level_gamma is None else high_level_gamma
    ends = turn_ends(response_mask)
    turn_advantages = discounted_sum(_td_errors(token_level_rewards, values, ends, high), ends, high * lam)
    deltas = torch.where(ends, turn_advantages, _td_errors(token_level_rewards, values, response_mask, gamma))
    # The last token has the advantage of the whole turn already, later turns included: nothing is added to it.
    factors = torch.full_like(deltas, gamma * lam).masked_fill_(ends, 0.0)
    advantages = zero_masked(discounted_sum(deltas, response_mask, factors), response_mask)
    whitened = _whitened(advantages, response_mask, token_level_rewards)
    return _as_given((whitened, advantages + zero_masked(values, response_mask)), token_level_rewards, values)


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
@with_public_arguments
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0, high_level_gamma: float | None = None
) -> tuple[Tensor, Tensor]:
    """REINFORCE with discounted returns, whitened over the batch.

        G_t = r_t + γ_t G_{t+1}        A = whiten(G)

    where t+1 is the next valid token: masked tokens (tool outputs) are skipped, so a reward at the end reaches every
    turn. γ_t is γ, and Γ (``high_level_gamma``) at the last token of a turn.
    """
    gamma_t = discounts(response_mask, gamma, high_level_gamma)
    returns = zero_masked(discounted_sum(token_level_rewards.double(), response_mask, gamma_t), response_mask)
    return _as_given((_whitened(returns, response_mask, token_level_rewards), returns), token_level_rewards)


@register_adv_est(
    "remax",
    paper="https://arxiv.org/abs/2310.10505",
    reproduces={"ReMax": ("algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=true")},
)
@with_public_arguments
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Reward to go, minus the reward of the greedy response to the same prompt.

        G_t = Σ_{s≥t} r_s        A_t = G_t - b

    with b, (bsz,) ``reward_baselines``, the summed reward of the greedy response.
    """
    returns, rounding = _returns_with_rounding(token_level_rewards, response_mask)
    baseline = reward_baselines.double().unsqueeze(-1)  # (bsz, 1)
    unit = rounding_unit(token_level_rewards.dtype)
    advantages = zero_masked(returns - baseline, response_mask)
    # A difference that rounding of equal rewards explains is no signal.
    advantages = advantages.masked_fill(advantages.abs() <= rounding + unit * baseline.abs(), 0.0)
    return _as_given((advantages, returns), token_level_rewards)


def _returns_with_rounding(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """G_t = Σ_{s≥t} r_s, and the bound of what rounding of the rewards may have changed in it; float64."""
    magnitude = reward_to_go(rewards.double().abs(), mask)
    return reward_to_go(rewards.double(), mask), magnitude * rounding_unit(rewards.dtype)


# ---- siblings at the same token or turn --------------------------------------------------------

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
@with_public_arguments
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
    """The baseline of least variance at each token: siblings weighted by their accumulated squared gradient norm.

        w_t = 1 - 2π_t + Σ_v π_t(v)²        W_t = Σ_{s≤t} w_s        B_t = Σ_j G_{j,t} W_{j,t} / (Σ_j W_{j,t} + ε)

        A_t = G_t - B_t        G_t = Σ_{s≥t} r_s

    over the siblings j that have a token of the policy at t. w_t = ‖onehot - π_t‖² is the squared norm of
    the gradient of log π_t in the logits. Truncated importance weights ρ (``rollout_is_weights``, if rollout
    correction makes them) scale that gradient: w_t becomes ρ_t² w_t.

    Where no sibling has a token at t the only return would be its own baseline, so B_t = 0 there; with
    ``handle_zero_tail=False`` only in a group of one.
    """
    returns, rounding = _returns_with_rounding(token_level_rewards, response_mask)
    gradient = 1 - 2 * zero_masked(old_log_probs, response_mask).exp() + sum_pi_squared
    if rollout_is_weights is not None:
        gradient = gradient * rollout_is_weights**2
    valid = response_mask.bool()
    weight = zero_masked(zero_masked(gradient, valid).cumsum(-1, dtype=torch.float64), valid)
    groups = Groups.from_ids(index, valid)
    baseline = groups.sums(returns * weight) / (groups.sums(weight) + epsilon)  # (groups, response_length)
    siblings = groups.sums(valid) if handle_zero_tail else groups.sums(groups.is_member).unsqueeze(-1)
    baseline = baseline.masked_fill(siblings <= 1, 0.0)
    advantages = zero_masked(returns - baseline[groups.index], valid)
    advantages = advantages.masked_fill(advantages.abs() <= rounding + groups.largest(rounding), 0.0)
    return _as_given((advantages, returns), token_level_rewards)


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
@with_public_arguments
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """The optimal token baseline for responses with tool outputs: siblings are compared at the policy's n-th token.

    It is ``optimal_token_baseline`` on responses from which all masked tokens have been removed, so that the length of
    a tool's output does not change which tokens are compared.
    """
    valid, width = response_mask.bool(), response_mask.shape[1]
    index_in_response = valid.cumsum(-1) - 1
    target = torch.where(valid, index_in_response, width)  # masked tokens go to a column that is cut off

    def squeezed(column: Tensor) -> Tensor:
        out = torch.zeros(len(column), width + 1, dtype=column.dtype, device=column.device)
        return out.scatter_(1, target, column)[:, :width]

    weights = None if rollout_is_weights is None else squeezed(rollout_is_weights)
    results = compute_optimal_token_baseline_advantage(
        squeezed(token_level_rewards), squeezed(valid), index, squeezed(old_log_probs), squeezed(sum_pi_squared),
        weights, epsilon=epsilon,
    )  # fmt: skip
    advantages, returns = (zero_masked(column.gather(1, index_in_response.clamp(min=0)), valid) for column in results)
    return advantages, returns


@register_adv_est(
    "grpo_per_turn",
    paper="https://arxiv.org/abs/2505.11821",
    reproduces={"credit per turn": ("algorithm.adv_estimator=grpo_per_turn", "algorithm.gamma=1.0")},
)
@with_public_arguments
def compute_grpo_per_turn_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    gamma: float = 1.0,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    high_level_gamma: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage of every turn: its return, normalised over the siblings at the same turn.

        G_k = R_k + Γ G_{k+1}        A_k = (G_k - mean_g G_k) / (std_g G_k + ε)

    R_k is the sum of the rewards on the tokens of turn k; Γ is ``high_level_gamma``, or ``gamma`` if that is None. Mean
    and deviation are over the siblings that have a k-th turn; if no other has, the baseline is 0 and the scale 1. With
    a single turn it is ``grpo``.

    MT-GRPO (arXiv:2505.11821) normalises the rewards of a turn and of the outcome separately and adds them;
    here they are added first, which works for any number of turns.

    Returns:
        advantages and returns, equal on every token of a turn.
    """
    turns, returns, rounding = _returns_of_turns(token_level_rewards, response_mask, gamma, high_level_gamma)
    rows, width = Groups.from_ids(index, response_mask), turns.has.shape[1]
    turn_index = torch.arange(width, device=turns.has.device)
    groups = Groups((rows.index.unsqueeze(-1) * width + turn_index).flatten(), turns.has.flatten(), rows.groups * width)
    scores = group_relative(returns, rounding, groups, epsilon, norm_adv_by_std_in_grpo)
    advantages = turns.on_tokens(scores.view(turns.has.shape))
    return _as_given((advantages, advantages.clone()), token_level_rewards)


class Turns(NamedTuple):
    """The turns of responses."""

    has: Tensor
    """(bsz, turns) bool, True where the response has so many turns."""
    turn_of_token: Tensor
    """(bsz, response_length) the turn of a valid token, from 0."""
    valid: Tensor
    """(bsz, response_length) bool."""

    @classmethod
    def from_mask(cls, response_mask: Tensor) -> Turns:
        """Find the contiguous runs of tokens of the policy."""
        valid = response_mask.bool()
        starts = valid & ~torch.nn.functional.pad(valid[:, :-1], (1, 0))
        # At least 1, because tokens of rows without a turn are scattered to turn 0.
        turns = max(int(starts.sum(-1).max()), 1) if starts.numel() else 1
        has = torch.arange(turns, device=valid.device) < starts.sum(-1, keepdim=True)
        return cls(has, (starts.cumsum(-1) - 1).clamp(min=0), valid)

    def on_tokens(self, turn_values: Tensor) -> Tensor:
        """Repeat a value per turn, (bsz, turns), on the tokens of the turn; 0 elsewhere."""
        return zero_masked(turn_values.gather(1, self.turn_of_token), self.valid)


def _returns_of_turns(
    rewards: Tensor, mask: Tensor, gamma: float, high_level_gamma: float | None
) -> tuple[Turns, Tensor, Tensor]:
    """Return the turns, and flat over all of them G_k = R_k + Γ G_{k+1} and the bound of its rounding, float64."""
    turns, valid_rewards = Turns.from_mask(mask), zero_masked(rewards, mask).double()
    factor = gamma if high_level_gamma is None else high_level_gamma

    def returns_of(rewards: Tensor) -> Tensor:
        sums = torch.zeros(turns.has.shape, dtype=torch.float64, device=valid_rewards.device)
        sums = sums.scatter_add(1, turns.turn_of_token, rewards)
        return zero_masked(discounted_sum(sums, turns.has, factor), turns.has).flatten()

    return turns, returns_of(valid_rewards), returns_of(valid_rewards.abs()) * rounding_unit(rewards.dtype)


@register_adv_est(
    "gigpo",
    paper="https://arxiv.org/abs/2505.10978",
    reproduces={
        "GiGPO": ("algorithm.adv_estimator=gigpo", "algorithm.gamma=0.95", "algorithm.step_advantage_weight=1.0")
    },
)
@with_public_arguments
def compute_gigpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    trajectory_conversation: Sequence[Sequence[JsonMapping] | None] | np.ndarray | None = None,
    gamma: float = 1.0,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    high_level_gamma: float | None = None,
    step_advantage_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Group-in-group advantage: of the whole response among its siblings, and of a turn among turns from one state.

        A_k   = A^E + ω A^S_k
        A^E   = (R - mean_g R) / (std_g R + ε)                    over the siblings, as ``grpo``
        A^S_k = (G_k - mean_s G) / (std_s G + ε), 0 if alone      over all turns of the siblings from the state s of k
        G_k   = R_k + Γ G_{k+1}                                   R_k the rewards of turn k

    The state before a turn is what the environment has said last: role and content of the messages
    (``trajectory_conversation``) between the turn and the one before it; before the first turn those of the prompt. So
    environments should describe their whole state in every message. Tokens would not do: how the chat template closes a
    turn that was cut is not the environment's.

    ω is ``step_advantage_weight``, Γ is ``high_level_gamma``, or ``gamma`` if that is None (0.95 in the paper); without
    ``norm_adv_by_std_in_grpo`` the denominators are 1. With ω = 0 it is ``grpo``.

    Raises:
        SchemaError: a row with several turns has no messages, or fewer turns in them than in its mask.
        UnsupportedError: the environment has shown an image, which the messages do not hold.
    """
    turns, returns, rounding = _returns_of_turns(token_level_rewards, response_mask, gamma, high_level_gamma)
    siblings, rewards = Groups.from_ids(index, response_mask), rewards_of_responses(token_level_rewards, response_mask)
    episode = group_relative(*rewards, siblings, epsilon, norm_adv_by_std_in_grpo)
    numbers = group_numbers(_states(trajectory_conversation, turns, siblings.index), turns.has.device)
    states = Groups(numbers, turns.has.flatten(), int(numbers.max()) + 1 if len(numbers) else 0)
    step = group_relative(returns, rounding, states, epsilon, norm_adv_by_std_in_grpo)
    step = step.masked_fill(states.is_alone, 0.0).view(turns.has.shape)
    advantages = turns.on_tokens(episode.unsqueeze(-1) + step_advantage_weight * step)
    return _as_given((advantages, advantages.clone()), token_level_rewards)


def _states(
    conversations: Sequence[Sequence[JsonMapping] | None] | np.ndarray | None, turns: Turns, groups: Tensor
) -> list[tuple[object, ...]]:
    """Return the group and the messages before each turn, of all turns in a row; else the group alone."""
    states: list[tuple[object, ...]] = []
    for row, (group, count) in enumerate(zip(groups.tolist(), turns.has.sum(-1).tolist(), strict=True)):
        conversation = None if conversations is None else conversations[row]
        if count < 2 and conversation is None:
            observations = [()] * count
        else:
            observations = _observations(conversation or (), count, row)
        states += [(group, *messages) for messages in observations] + [(group,)] * (turns.has.shape[1] - count)
    return states


def _observations(conversation: Sequence[JsonMapping], count: int, row: int) -> list[tuple[str, ...]]:
    """Return roles and contents of the messages before each of the last ``count`` turns of the policy."""
    ends = [place for place, message in enumerate(conversation) if message["role"] == "assistant"]
    if len(ends) < count:
        raise SchemaError(
            f"advantage estimator 'gigpo' compares turns by the messages before them: row {row} has {count} turns of "
            f"the policy in response_mask, and trajectory_conversation has {len(ends)}. An agent loop of yours must "
            "return all messages (AgentLoopOutput.conversation); or use grpo_per_turn."
        )
    # Assistants of the prompt come before those of the policy, and so do turns that another sequence trains on.
    policy = ends[len(ends) - count :]
    before_turns = [
        conversation[start:end] for start, end in zip([0, *(end + 1 for end in policy)], policy, strict=False)
    ]
    if any(has_image_parts(message["content"]) for messages in before_turns[1:] for message in messages):
        raise UnsupportedError(
            f"advantage estimator 'gigpo' compares turns by the texts before them, and in row {row} the environment "
            "has shown an image. Describe the state in text, or use grpo_per_turn."
        )
    return [
        tuple(json.dumps([message["role"], message["content"]], sort_keys=True) for message in messages)
        for messages in before_turns
    ]
