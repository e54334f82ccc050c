"""Sums along a response, from its end to its beginning, in which masked tokens take no time."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.utils.torch_functional import zero_masked


def discounted_sum(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor · y_{t+1} on valid tokens; masked tokens carry y_{t+1} through unchanged.

    So time stands still over tool outputs and padding: tokens before them see what comes after
    them as if they were not there.

    Args:
        x: (bsz, response_length).
        mask: (bsz, response_length).
        factor: the discount.

    Returns:
        (bsz, response_length), carried values included.
    """
    valid, x = mask.bool(), x.to(torch.promote_types(x.dtype, torch.float32))
    return _backwards(zero_masked(x, valid), torch.ones_like(x).masked_fill_(valid, factor))


def next_valid(values: Tensor, mask: Tensor) -> Tensor:
    """For each token the value at the next valid token after it; 0 after the last.

    Args:
        values: (bsz, response_length).
        mask: (bsz, response_length).
    """
    valid = mask.bool()
    nearest = _backwards(zero_masked(values, valid), (~valid).to(values.dtype))
    return torch.nn.functional.pad(nearest[:, 1:], (0, 1))[:, : values.shape[1]]


def reward_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """G_t = Σ_{s≥t} r_s over valid tokens, 0 at masked ones; both (bsz, response_length)."""
    kept = zero_masked(rewards.to(torch.promote_types(rewards.dtype, torch.float32)), mask)
    return zero_masked(kept.flip(-1).cumsum(-1).flip(-1), mask)


def _backwards(x: Tensor, keep: Tensor) -> Tensor:
    """y_t = x_t + keep_t · y_{t+1}: one fused operation on all rows per token, over memory that lies by token."""
    y = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device)  # (response_length, bsz)
    after = x.new_zeros(x.shape[0])
    columns = zip(x.t().contiguous().unbind(), keep.t().contiguous().unbind(), y.unbind(), strict=True)
    for here, factor, out in reversed(list(columns)):
        after = torch.addcmul(here, factor, after, out=out)
    return y.t().contiguous()
