"""Pure functions of tensors: masked statistics, log-probs, entropy, padding, learning-rate schedules.

A masked entry does not affect any result, whatever it holds (NaN and infinity included), and gets
no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Axis = int | tuple[int, ...] | None


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` with 0 where ``mask`` is 0; even NaN there reaches neither result nor gradient."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def all_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite, without a copy of large tensors."""
    # A sum is NaN or infinite if a term is; finite terms may overflow, so these are looked at. The sum is in the format
    # of the values, or PyTorch would convert them all on a CPU, which takes 16 times as long.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Σ values·mask, over ``axis`` or over everything; ``mask`` is broadcast."""
    return zero_masked(values, mask).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Mean of the valid entries, over ``axis`` or over everything; 0 where nothing is valid."""
    count = mask.bool().expand_as(values).sum(dim=axis)
    return masked_sum(values, mask, axis) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the valid entries of the whole tensor; 0 for a single entry."""
    values = zero_masked(values, mask)
    mean = masked_mean(values, mask)
    count = mask.bool().expand_as(values).sum()
    return masked_sum((values - mean) ** 2, mask) / (count - int(unbiased)).clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, rounding: float | Tensor | None = None
) -> Tensor:
    """Scale the valid entries to variance 1 and shift them to mean 0; 0 where ``mask`` is 0.

        (x - mean) / √(var + 1e-8)        var unbiased, over the whole tensor

    With ``shift_mean=False`` they are scaled only and keep their mean. Of an entry no farther from the mean than
    ``rounding``, the bound of what rounding may have changed in an entry, x - mean is 0. Its default is that of storing
    the largest entry: max|x| times the ε of the dtype.
    """
    # In float64: where the spread is small beside the mean, float32 sums would shift every entry by their rounding.
    is_masked, count = mask == 0, mask.count_nonzero()
    valid = values.masked_fill(is_masked, 0.0)
    mean = valid.sum(dtype=torch.float64) / count.clamp(min=1)
    centred = valid.to(torch.float64).sub_(mean).masked_fill_(is_masked, 0.0).flatten()
    if values.numel():
        bound = torch.finfo(values.dtype).eps * valid.abs().max() if rounding is None else rounding
        centred.masked_fill_(centred.abs() <= bound, 0.0)
    whitened = centred.mul_(torch.rsqrt(centred.dot(centred) / (count - 1).clamp(min=1) + 1e-8)).view(valid.shape)
    return (whitened if shift_mean else whitened.add_(mean).masked_fill_(is_masked, 0.0)).to(values.dtype)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """log softmax(logits)[labels], in float32, or float64 if the logits are.

    Args:
        logits: (..., vocabulary), of any floating dtype.
        labels: (...) token ids; the id -100 means no token and gives 0.
        inplace_backward: a hint of public code, which may overwrite the logits; they are never overwritten here.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Not log_softmax, which is less exact for many tokens on CPUs.
    target_logits = wide.gather(-1, labels.masked_fill(labels == -100, 0).unsqueeze(-1)).squeeze(-1)
    return (target_logits - wide.logsumexp(-1)).masked_fill(labels == -100, 0.0)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """-Σ_v p_v log p_v of p = softmax(logits), in float32, or float64 if the logits are.

    From (..., vocabulary) to (...). A logit of -inf (a forbidden token) counts as p log p = 0.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = wide - wide.logsumexp(-1, keepdim=True)
    return -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1)


def allgather_dict_tensors(
    tensors: dict[str, Tensor] | TensorDict, size: int, group: dist.ProcessGroup | None, dim: int = 0
) -> dict[str, Tensor] | TensorDict:
    """Concatenate the tensors of all ``size`` ranks of a group along ``dim``, by name and in the order of the ranks.

    All ranks must have the same names and shapes. A ``TensorDict`` gives a ``TensorDict``.
    """
    gathered = {}
    for name in sorted(map(str, tensors.keys())):
        mine = tensors[name].contiguous()
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group=group)
        gathered[name] = torch.cat(parts, dim=dim)
    return (
        TensorDict(gathered, batch_size=[tensors.batch_size[0] * size]) if isinstance(tensors, TensorDict) else gathered
    )


# ---- padding and masks ------------------------------------------------------------------------


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """Pad the last dimension to ``max_seq_len``; a tensor of at least that length is returned as it is."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Convert ragged token lists to one right-padded (rows, width) int64 tensor; rows may be empty.

    The width is that of the longest row, but at least ``max_length``: longer rows are not truncated.
    """
    width = max([len(row) for row in response] + [max_length or 0])
    padded = torch.full((len(response), width), pad_token_id, dtype=torch.int64)
    for row_index, row in enumerate(response):
        padded[row_index, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
    return padded


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end token of each row, 0 after it; all 1 in a row without an end token.

        ids 5 7 2 9 2 with end token 2  →  1 1 1 0 0

    ``response_id`` and the result are (bsz, response_length); ``eos_token`` is one id or several.
    """
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device))
    ended_before = ends.long().cumsum(dim=-1) - ends.long()
    return (ended_before == 0).to(dtype)


get_eos_mask = get_response_mask
"""Older name of :func:`get_response_mask`, used by existing scripts."""


# ---- learning-rate schedules ------------------------------------------------------------------


def warmup_factor(step: int, num_warmup_steps: int) -> float:
    """Linear warm-up: (step + 1) / (w + 1) for the steps 0 … w-1, then 1."""
    # Not from 0: the first step, with its rollout, would then change nothing.
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


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1, init_lr_ratio: float = 0.0
) -> LambdaLR:
    """Learning rate with linear warm-up from ``init_lr_ratio``, a fraction of the peak, then constant."""
    rise = 1.0 - init_lr_ratio
    return LambdaLR(optimizer, lambda step: init_lr_ratio + rise * warmup_factor(step, num_warmup_steps), last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float | None = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
    zero_indexed_step: bool = True,
) -> LambdaLR:
    """Learning rate with linear warm-up, then a cosine decay to ``min_lr_ratio`` of its peak.

    Args:
        optimizer: its learning rates are the peak.
        num_warmup_steps: steps of the warm-up.
        num_training_steps: step at which the decay ends; later steps keep its last value.
        min_lr_ratio: final rate as a fraction of the peak; None is 0.
        num_cycles: cosine periods of the decay; 0.5 is one descent.
        last_epoch: step to resume from.
        init_lr_ratio: rate from which the warm-up rises, as a fraction of the peak; None is 0.
        zero_indexed_step: the first update is step 0, at 1/(w+1) of the warm-up; with False it is step 1, at 1/w.

    Raises:
        ValueError: ``min_lr_ratio`` or ``init_lr_ratio`` is outside of [0, 1].
    """
    ratio, start = min_lr_ratio or 0.0, init_lr_ratio or 0.0
    for name, value in (("min_lr_ratio", ratio), ("init_lr_ratio", start)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}={value} is no fraction of the peak: use a number from 0 to 1.")

    def factor(step: int) -> float:
        step += not zero_indexed_step
        if step < num_warmup_steps:
            risen = warmup_factor(step, num_warmup_steps) if zero_indexed_step else step / num_warmup_steps
            return start + (1.0 - start) * risen
        return cosine_factor(step, num_warmup_steps, num_training_steps, ratio, num_cycles)

    return LambdaLR(optimizer, factor, last_epoch)
