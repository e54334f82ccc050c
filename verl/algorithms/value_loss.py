"""Value loss of the critic."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from verl.algorithms.aggregate import LossTotals, agg_loss
from verl.utils.torch_functional import masked_mean, zero_masked


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[LossTotals],
) -> tuple[Tensor, Tensor]:
    """Squared error of the critic, with its change from the old values clipped.

        l_t = ½ · max((v - R)², (clip(v, v_old - c, v_old + c) - R)²)

    Paper: PPO, https://arxiv.org/abs/1707.06347 (the clip is that of its reference code).

    With v = ``vpreds`` (with gradient), R = ``returns``, v_old = ``values`` of the critic before the update and c =
    ``cliprange_value``. Tensors are (bsz, response_length); aggregation and ``totals`` are those of :func:`agg_loss`.

    Returns:
        the loss, and the fraction of valid tokens whose clipped error is the larger one; scalars.
    """
    vpreds, returns, values = (zero_masked(x, response_mask) for x in (vpreds, returns, values))
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain_error, clipped_error = (vpreds - returns) ** 2, (clipped - returns) ** 2
    loss_mat = 0.5 * torch.maximum(plain_error, clipped_error)
    clip_fraction = masked_mean((clipped_error > plain_error).float(), response_mask)
    return agg_loss(loss_mat, response_mask, loss_agg_mode, **totals), clip_fraction
