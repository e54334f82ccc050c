"""Random mini-batches for policy losses, and every (loss, aggregation) pair that there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms import (
    LOSS_AGG_MODES,
    LossTotals,
    evaluate_policy_loss,
    policy_loss_info,
    policy_loss_names,
    prepare_update,
)
from verl.config import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig

OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 3.0},
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7},
    "dro": {"dro_beta": 0.5},
    "bypass_mode": {"rollout_correction": RolloutCorrectionConfig(bypass_mode=True)},
}
"""``policy_loss`` settings with which a loss does on a few tokens what it is there for."""

PAIRS = [
    (name, mode)
    for name in policy_loss_names()
    for mode in LOSS_AGG_MODES
    if (modes := policy_loss_info(name).modes) is None or mode in modes
]


def actor(name: str = "vanilla", own: dict[str, Any] | None = None, **changes: Any) -> ActorConfig:
    """The actor's section with this loss; ``own`` are settings of ``policy_loss``."""
    policy_loss = PolicyLossConfig(loss_mode=name, **OWN_SETTINGS.get(name, {}) | (own or {}))
    return ActorConfig(
        **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0, "policy_loss": policy_loss} | changes
    )


def batch(seed: int, rows: int = 6, width: int = 5, spread: float = 0.5, per_row: bool = False) -> dict[str, Tensor]:
    """Ragged responses, at times an empty one; ``per_row`` gives all tokens of a response one advantage."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    old = -torch.rand((rows, width), generator=g, dtype=torch.float64) * 3 - 1e-3
    lengths = torch.randint(0, width + 1, (rows, 1), generator=g)
    mask = (torch.arange(width) < lengths) & (torch.rand((rows, width), generator=g) < 0.8)
    return {
        "old_log_probs": old,
        "log_probs": (old + spread * normal(rows, width)).clamp(max=-1e-4),
        "advantages": normal(rows, 1).expand(rows, width).clone() if per_row else normal(rows, width),
        "response_mask": mask.long(),
        "entropys": torch.rand((rows, width), generator=g, dtype=torch.float64),
        "ref_log_prob": old - 0.3 * normal(rows, width).abs(),
        "rollout_log_probs": old.clone(),
    }


def groups(rows: int, size: int = 2) -> np.ndarray:
    """Group ids: neighbours are siblings."""
    return np.array([f"prompt {row // size}" for row in range(rows)], dtype=object)


def evaluate(
    name: str,
    data: dict[str, Tensor],
    mode: str = "token-sum",
    config: ActorConfig | None = None,
    weights: Tensor | None = None,
    seed: int = 0,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The loss of a whole mini-batch, its metrics, and its gradient by the log-probs."""
    config = actor(name, loss_agg_mode=mode) if config is None else config
    made = prepare_update({**data, "index": groups(len(data["advantages"]))}, config, seed)
    totals = LossTotals(row_weights=made.get("row_weights"))
    log_prob = data["log_probs"].clone().requires_grad_()
    loss, metrics = evaluate_policy_loss(policy_loss_info(name), log_prob, data | made, weights, mode, config, totals)
    loss.backward()
    assert log_prob.grad is not None
    return loss.detach(), metrics, log_prob.grad
