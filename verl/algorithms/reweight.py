"""PF-PPO: resample the rows of a batch in favour of extreme scores."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.groups import rewards_of_responses
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.schema import require


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0, seed: int = 0
) -> DataProto:
    """Resample a batch with replacement, to the same size, with probabilities that depend on the score.

    Policy filtration for PPO (arXiv:2409.06957): a reward model is most reliable where its scores are
    extreme. With s_i = Σ_t token_level_scores_{i,t}·m_{i,t}, a row is drawn with probability ∝

        pow          |s_i|^weight_pow
        max_min      1 for rows of the largest and of the smallest score, 0 for others
        max_random   0.4 for rows of the largest score, 0.1 for others

    A row without a valid token is never drawn, unless there are no others; if every weight is 0 the valid rows are
    equally likely. A row that is drawn twice becomes two siblings. The draw depends on ``seed`` alone; use another seed
    for every step.

    Raises:
        ConfigError: there is no such method.
        SchemaError: ``token_level_scores`` or ``response_mask`` is missing.
    """
    require(data, ("token_level_scores", "response_mask"), "PF-PPO")
    scores, rounding = rewards_of_responses(data.batch["token_level_scores"], data.batch["response_mask"])
    is_valid = data.batch["response_mask"].bool().any(-1)
    if not is_valid.any():
        is_valid = torch.ones_like(is_valid)  # nothing can be learned from any row, so any will do
    weights = torch.zeros_like(scores)
    weights[is_valid] = pf_ppo_weights(scores[is_valid], reweight_method, weight_pow, rounding[is_valid])
    weights = weights.cpu().numpy()
    rows = np.random.default_rng(seed).choice(len(weights), size=len(weights), p=weights / weights.sum())
    return data.select_idxs(torch.from_numpy(rows))


def pf_ppo_weights(
    scores: Tensor, reweight_method: str, weight_pow: float = 2.0, rounding: Tensor | float = 0.0
) -> Tensor:
    """Unnormalised sampling probabilities, (bsz,), of scores, (bsz,); see :func:`compute_pf_ppo_reweight_data`.

    At least one is above 0. ``rounding``, (bsz,), bounds what rounding may have changed in each score: scores that
    differ from the largest or smallest by that alone are as large or small.
    """
    is_best = scores + rounding >= (scores - rounding).max()
    match reweight_method:
        case "pow":
            magnitude = scores.abs()
            weights = (magnitude / magnitude.max().clamp(min=torch.finfo(scores.dtype).tiny)) ** weight_pow
        case "max_min":
            weights = (is_best | (scores - rounding <= (scores + rounding).min())).to(scores.dtype)
        case "max_random":
            weights = torch.where(is_best, 0.4, 0.1).to(scores.dtype)
        case _:
            raise ConfigError(f"reweight_method={reweight_method} is unknown. Use pow, max_min or max_random.")
    return weights if (weights > 0).any() else torch.ones_like(weights)
