"""Value loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregate import agg_loss
from verl.algorithms.groups import GroupIds
from verl.utils.torch_functional import masked_mean, zero_masked


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    row_weights: Tensor | None = None,
    index: GroupIds | None = None,
) -> tuple[Tensor, Tensor]:
    """Squared error of the critic, with its change from the old values clipped.

        l_t = ½ · max((v - R)², (clip(v, v_old - c, v_old + c) - R)²)

    Paper: PPO, https://arxiv.org/abs/1707.06347 (the clip is that of its reference code).

    With v = ``vpreds`` (with gradient), R = ``returns``, v_old = ``values`` of the critic before the update and c =
    ``cliprange_value``. Tensors are (bsz, response_length); aggregation and denominators are as in :func:`agg_loss`.

    Returns:
        the loss, and the fraction of valid tokens whose clipped error is the larger one; scalars.
    """
    vpreds, returns, values = (zero_masked(x, response_mask) for x in (vpreds, returns, values))
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain_error, clipped_error = (vpreds - returns) ** 2, (clipped - returns) ** 2
    loss_mat = 0.5 * torch.maximum(plain_error, clipped_error)
    clip_fraction = masked_mean((clipped_error > plain_error).float(), response_mask)
    loss = agg_loss(
        loss_mat,
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
        row_weights,
        index,
    )
    return loss, clip_fraction
