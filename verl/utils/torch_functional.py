"""Small pure functions of tensors: masked statistics, log-probs, entropy, padding, learning-rate schedules.

A masked entry has no influence on any result, whatever it holds (also NaN or infinity), and gets
no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Axis = int | tuple[int, ...] | None


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` with 0 where ``mask`` is 0, so that what stands there cannot reach a result or a gradient."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Σ values·mask, over ``axis`` or over everything.

    Args:
        values: any shape.
        mask: same shape (or broadcastable), 1 on valid entries.
        axis: dimensions to reduce; None reduces all.
    """
    return zero_masked(values, mask).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Mean of the valid entries, over ``axis`` or over everything; 0 where nothing is valid."""
    count = mask.bool().expand_as(values).sum(dim=axis)
    return masked_sum(values, mask, axis) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the valid entries of the whole tensor.

    Args:
        values: any shape.
        mask: same shape, 1 on valid entries.
        unbiased: divide by n - 1 instead of n. A single entry has variance 0 either way.
    """
    values = zero_masked(values, mask)
    mean = masked_mean(values, mask)
    count = mask.bool().expand_as(values).sum()
    return masked_sum((values - mean) ** 2, mask) / (count - int(unbiased)).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Valid entries scaled to variance 1 and shifted to mean 0; 0 where ``mask`` is 0.

        (x - mean) / √(var + 1e-8)        var unbiased, over the whole tensor

    Args:
        values: any shape.
        mask: same shape, 1 on valid entries.
        shift_mean: if false, scale only and keep the mean.
    """
    # In float64: where the spread is small beside the mean, float32 sums would shift every entry by their rounding.
    is_masked, count = mask == 0, mask.count_nonzero()
    kept = values.masked_fill(is_masked, 0.0)
    mean = kept.sum(dtype=torch.float64) / count.clamp(min=1)
    centred = kept.to(torch.float64).sub_(mean).masked_fill_(is_masked, 0.0).flatten()
    whitened = centred.mul_(torch.rsqrt(centred.dot(centred) / (count - 1).clamp(min=1) + 1e-8)).view(kept.shape)
    return (whitened if shift_mean else whitened.add_(mean).masked_fill_(is_masked, 0.0)).to(values.dtype)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits)[labels], in float32 at least.

    Args:
        logits: (..., vocabulary), of any floating dtype.
        labels: (...) token ids; the id -100 stands for no token and gives 0.

    Returns:
        (...) float32 (float64 if the logits are).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = torch.nn.functional.cross_entropy(wide.reshape(-1, wide.shape[-1]), labels.reshape(-1), reduction="none")
    return -loss.view(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """-Σ_v p_v log p_v of p = softmax(logits), in float32 at least.

    A logit of -inf (a forbidden token) counts as p log p = 0.

    Args:
        logits: (..., vocabulary), of any floating dtype.

    Returns:
        (...) float32 (float64 if the logits are).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = torch.log_softmax(wide, dim=-1)
    return -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1)


# ---- padding and masks ------------------------------------------------------------------------


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """Widen the last dimension to ``max_seq_len``; what is as long already comes back as it is."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Ragged token lists as one right-padded tensor.

    Args:
        response: one list of token ids per row; rows may be empty.
        pad_token_id: fills the rest.
        max_length: width at least; None takes the longest row. Longer rows are kept whole.

    Returns:
        (rows, width) int64.
    """
    width = max([len(row) for row in response] + [max_length or 0])
    padded = torch.full((len(response), width), pad_token_id, dtype=torch.int64)
    for number, row in enumerate(response):
        padded[number, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
    return padded


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end token of each row, 0 after it.

        ids 5 7 2 9 2 with end token 2  →  1 1 1 0 0

    Args:
        response_id: (bsz, response_length) token ids.
        eos_token: the id, or ids, that end a response.
        dtype: of the result.

    Returns:
        (bsz, response_length); all 1 in a row without an end token.
    """
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device))
    ended_before = ends.long().cumsum(dim=-1) - ends.long()
    return (ended_before == 0).to(dtype)


get_eos_mask = get_response_mask
"""Older name that scripts still use."""


# ---- learning-rate schedules ------------------------------------------------------------------


def warmup_factor(step: int, num_warmup_steps: int) -> float:
    """Linear warm-up: (step + 1) / (w + 1) for the steps 0 … w-1, then 1.

    The first step already moves: a factor of 0 would spend a step, and its rollout, on nothing.
    """
    return min(1.0, (step + 1) / (num_warmup_steps + 1))


def cosine_factor(
    step: int, num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float = 0.0, num_cycles: float = 0.5
) -> float:
    """Linear warm-up, then r + (1 - r)·(1 + cos(2π·cycles·p))/2 with p from 0 to 1 over the remaining steps."""
    if step < num_warmup_steps:
        return warmup_factor(step, num_warmup_steps)
    progress = min(1.0, (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps))
    fall = (1.0 + math.cos(2.0 * math.pi * num_cycles * progress)) / 2.0
    return min_lr_ratio + (1.0 - min_lr_ratio) * fall


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """The learning rate rises linearly over ``num_warmup_steps``, then stays."""
    return LambdaLR(optimizer, lambda step: warmup_factor(step, num_warmup_steps), last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float | None = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """The learning rate rises linearly, then falls along a cosine to ``min_lr_ratio`` of its peak.

    Args:
        optimizer: its learning rates are the peak.
        num_warmup_steps: steps of the rise.
        num_training_steps: step at which the fall ends; later steps stay there.
        min_lr_ratio: end of the fall, as a fraction of the peak; None is 0.
        num_cycles: cosine periods of the fall; 0.5 is one descent.
        last_epoch: step to resume from.

    Raises:
        ValueError: ``min_lr_ratio`` is outside of [0, 1].
    """
    ratio = min_lr_ratio or 0.0
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"min_lr_ratio={ratio} is no fraction of the peak: use a number from 0 to 1.")
    return LambdaLR(
        optimizer,
        lambda step: cosine_factor(step, num_warmup_steps, num_training_steps, ratio, num_cycles),
        last_epoch,
    )
