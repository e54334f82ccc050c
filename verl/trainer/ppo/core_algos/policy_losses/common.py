"""What every policy loss shares: the ratio, the weights, the way to a scalar."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.trainer.ppo.core_algos.aggregate import agg_loss
from verl.utils.torch_functional import masked_mean, zero_masked

LOG_RATIO_BOUND = 20.0
"""|log π - log π_old| is cut here, so that no ratio overflows."""

PolicyLossResult = tuple[Tensor, dict[str, Tensor]]
"""The loss, a scalar, and metrics: means over the valid tokens at hand."""


def valid_only(response_mask: Tensor, *columns: Tensor) -> list[Tensor]:
    """Each column with 0 at masked places, so that what stands there reaches neither value nor gradient."""
    return [zero_masked(column, response_mask) for column in columns]


def log_ratio_of(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """clamp(log π - log π_old, ±20), per token."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def weighted(loss_mat: Tensor, rollout_is_weights: Tensor | None, response_mask: Tensor) -> Tensor:
    """Per-token losses times their importance weights, which get no gradient; unchanged without weights."""
    if rollout_is_weights is None:
        return loss_mat
    return loss_mat * zero_masked(rollout_is_weights, response_mask).detach()


def reduce_loss(
    loss_mat: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None,
    per_token_metrics: dict[str, Tensor],
) -> PolicyLossResult:
    """Weigh and aggregate the losses; average the metrics.

    Args:
        loss_mat: (bsz, response_length) per-token losses.
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section, for ``global_batch_info``.
        rollout_is_weights: (bsz, response_length) or None, see :func:`weighted`.
        per_token_metrics: by name, each (bsz, response_length).
    """
    loss_mat = weighted(loss_mat, rollout_is_weights, response_mask)
    loss = agg_loss(loss_mat, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {name: masked_mean(_number(values), response_mask) for name, values in per_token_metrics.items()}


def _number(values: Tensor) -> Tensor:
    return values.float() if values.dtype == torch.bool else values.detach()


def usual_metrics(clipped: Tensor, log_ratio: Tensor, clipped_lower: Tensor | None = None) -> dict[str, Tensor]:
    """The metrics that all losses report, per token.

    Args:
        clipped: (bsz, response_length) where the loss stops or bounds the gradient.
        log_ratio: (bsz, response_length) log π - log π_old.
        clipped_lower: (bsz, response_length) where its second bound does; None if it has none.
    """
    return {
        "actor/pg_clipfrac": clipped,
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": torch.zeros_like(log_ratio) if clipped_lower is None else clipped_lower,
    }


def configured(config: Any, name: str) -> Any:
    """The configuration, which is not optional.

    Raises:
        ConfigError: there is none.
    """
    if config is None:
        raise ConfigError(f"the {name} policy loss needs the actor's configuration: pass config=ActorConfig(...).")
    return config
