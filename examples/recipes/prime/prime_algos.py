"""PRIME (https://arxiv.org/abs/2502.01456): implicit process rewards, the loss that learns them, and advantages.

The process reward model is a language model π_φ. What it has learned from outcomes alone gives a reward to each token,

    r_φ(y_t) = β (log π_φ(y_t | y_<t) - log π_ref(y_t | y_<t)),

because the sum of these over a response is trained as the logit of its being right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.workers.fsdp_workers import ActorRolloutRefWorker

BETA = 0.05
"""β of the paper."""


class ImplicitRewardWorker(ActorRolloutRefWorker):
    """Worker with π_φ: ``compute_log_prob`` and ``update_actor`` are those of a policy, with the loss below."""


def process_rewards(log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """r_φ of every response token, 0 elsewhere; (bsz, response_length)."""
    return BETA * (log_prob - ref_log_prob) * response_mask


@register_policy_loss("implicit_prm")
def compute_implicit_prm_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy between σ(Σ_t r_φ(y_t)) and the outcome, averaged over the responses.

    In the place of what a policy is trained with stand ``old_log_prob``, that of π_ref, and ``advantages``, the outcome
    of the response (0 or 1) on each of its tokens.
    """
    logits = process_rewards(log_prob, old_log_prob, response_mask).sum(-1, keepdim=True)  # (bsz, 1)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        logits.expand_as(log_prob), advantages, reduction="none"
    )
    loss = agg_loss(losses * response_mask, response_mask, "seq-mean-token-mean", **config.global_batch_info)
    hits = ((logits > 0) == (advantages > 0.5)) * response_mask
    return loss, {"prm/accuracy": (hits.sum() / response_mask.sum().clamp(min=1)).item()}


def others_mean(values: Tensor, index: np.ndarray) -> Tensor:
    """Mean over the other responses to the same prompt, 0 for an only one; (bsz,).

    >>> others_mean(torch.tensor([1.0, 2.0, 6.0]), np.array(["a", "a", "a"])).tolist()
    [4.0, 3.5, 1.5]
    """
    others = torch.from_numpy(index[:, None] == index[None, :]).to(values)  # (bsz, bsz)
    others.fill_diagonal_(0)
    return others @ values / others.sum(-1).clamp(min=1)


@register_adv_est("prime", paper="https://arxiv.org/abs/2502.01456")
def compute_prime_advantage(
    token_level_rewards: Tensor, rm_scores: Tensor, response_mask: Tensor, index: np.ndarray, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return of the process rewards plus the outcome, each against the other responses to the prompt.

        A_t = Σ_{s≥t} γ^{s-t} (r_φ(y_s) - mean_{j≠i} r̄_j) + r_o - mean_{j≠i} r_o,j

    r̄_j is the mean process reward per token of response j, r_o the outcome.

    Args:
        token_level_rewards: (bsz, response_length), whose sum is the outcome.
        rm_scores: (bsz, response_length) process rewards.
        response_mask: (bsz, response_length) 1 on response tokens.
        index: (bsz,) id of the prompt.
        gamma: discount per token.
    """
    outcomes = token_level_rewards.sum(-1)
    means = (rm_scores * response_mask).sum(-1) / response_mask.sum(-1).clamp(min=1)
    centred = (rm_scores - others_mean(means, index).unsqueeze(-1)) * response_mask
    returns, running = torch.zeros_like(centred), torch.zeros_like(outcomes)
    for t in reversed(range(centred.shape[1])):
        running = centred[:, t] + gamma * running
        returns[:, t] = running
    advantages = (returns + (outcomes - others_mean(outcomes, index)).unsqueeze(-1)) * response_mask
    return advantages, advantages.clone()
