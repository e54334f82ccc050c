"""Self-Play Preference Optimization (https://arxiv.org/abs/2405.00675): win rates, and the loss that learns them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

ETA = 1.0
"""η of the paper, which has 1000 for responses of a few hundred tokens."""


def win_rates(scores: Tensor, index: np.ndarray) -> Tensor:
    """P̂(y_i ≻ π_t | x): share of the prompt's responses that y_i beats; one of equal score counts half. (bsz,)

    >>> win_rates(torch.tensor([1.0, 0.0, 1.0, 0.0]), np.array(["a", "a", "a", "a"])).tolist()
    [0.75, 0.25, 0.75, 0.25]
    """
    same_prompt = torch.from_numpy(index[:, None] == index[None, :]).to(scores)  # (bsz, bsz)
    beats = (1 + torch.sign(scores[:, None] - scores[None, :])) / 2
    return (beats * same_prompt).sum(-1) / same_prompt.sum(-1)


@register_adv_est("sppo", paper="https://arxiv.org/abs/2405.00675")
def compute_sppo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray
) -> tuple[Tensor, Tensor]:
    """What the loss fits the log-ratio of a response to: η (P̂ - 1/2), on each of its tokens."""
    targets = ETA * (win_rates(token_level_rewards.sum(-1), index) - 0.5)
    advantages = targets.unsqueeze(-1) * response_mask  # (bsz, response_length)
    return advantages, advantages.clone()


@register_policy_loss("sppo")
def compute_sppo_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Squared error of each response, (log π_θ(y|x) - log π_t(y|x) - η (P̂ - 1/2))², averaged over the responses.

    π_t is the policy that sampled them. The square is written on every token of its response, whose mean is taken.
    """
    ratio = ((log_prob - old_log_prob) * response_mask).sum(-1, keepdim=True)  # (bsz, 1)
    squares = ((ratio - advantages) * response_mask) ** 2
    weighted = squares if rollout_is_weights is None else squares * rollout_is_weights
    loss = agg_loss(weighted, response_mask, "seq-mean-token-mean", **config.global_batch_info)
    mean_ratio = (ratio.detach() * response_mask).sum() / response_mask.sum().clamp(min=1)
    return loss, {"actor/sppo_log_ratio": mean_ratio.item()}
