"""Attention of one new token per row over keys and values in memory, as a Triton kernel for NVIDIA GPUs.

``scaled_dot_product_attention`` reads keys and values up to the longest row, and a mask; this kernel reads those of
each row alone, once for all query heads that share them, and stores the new ones on the way. Where rows are few,
several programs share a row, and a second kernel adds their parts (arXiv:2311.01282).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

_BLOCK = 64
"""Tokens that a program reads at once."""
_MIN_HEADS = 16
"""Rows of the smallest matrix that tensor cores multiply."""
_MAX_PARTS = 32
"""Largest number of programs for one row and head, whose results are combined at the end."""
_PROGRAMS_PER_PROCESSOR = 2
"""Programs for each multiprocessor of the device, at least; see :func:`parts_of_rows`."""


def can_decode(device: torch.device, head_dim: int) -> bool:
    """Return whether the kernel runs here: a GPU, Triton, and a head width that is a power of two from 16 to 256."""
    has_triton = importlib.util.find_spec("triton") is not None  # PyTorch for CPUs comes without it
    return has_triton and device.type == "cuda" and head_dim in (16, 32, 64, 128, 256)


def parts_of_rows(rows: int, tokens: int, kv_heads: int, processors: int) -> int:
    """Return by how many programs each row and head is computed, so that all processors of the device have work.

    Args:
        rows: rows of the pass.
        tokens: largest number of tokens of a row.
        kv_heads: key/value heads.
        processors: multiprocessors of the device.
    """
    parts = -(-_PROGRAMS_PER_PROCESSOR * processors // max(1, rows * kv_heads))
    return max(1, min(parts, _MAX_PARTS, -(-tokens // (4 * _BLOCK))))


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Store the key and value of each row's new token, then attend to all tokens of the row.

    out = softmax(cap(query · keysᵀ · scale)) · values, over the tokens up to the new one, of which a window keeps the
    last; cap(s) = softcap · tanh(s / softcap). Scores and sums are fp32.

    Args:
        query: (rows, heads, head_dim).
        key: (rows, kv_heads, head_dim) of the new tokens.
        value: likewise.
        keys: (rows, kv_heads, tokens, head_dim) in memory, written at ``positions``.
        values: likewise.
        positions: (rows,) int64, number of tokens before the new one.
        scale: factor of the scores.
        window: number of last tokens that are attended to; None: all.
        softcap: bound of the scores; None: none.

    Returns:
        (rows, heads, head_dim), contiguous.
    """
    from verl.backends.cuda import decode_kernels

    rows, heads, head_dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    group = heads // kv_heads
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 8
    parts = parts_of_rows(rows, tokens if window is None else min(tokens, window), kv_heads, processors)
    out = query.new_empty(rows, heads, head_dim)
    partial = query.new_empty((rows, heads, parts, head_dim) if parts > 1 else (1,), dtype=torch.float32)
    sums = query.new_empty((2, rows, heads, parts) if parts > 1 else (1,), dtype=torch.float32)
    attend: Any = decode_kernels.attend  # a function that Triton compiles, called as kernel[grid](...)
    attend[rows, kv_heads, parts](
        query,
        key,
        value,
        keys,
        values,
        positions,
        out,
        partial,
        sums,
        sums[1] if parts > 1 else sums,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        scale,
        window or 0,
        softcap or 0.0,
        GROUP=group,
        PADDED_GROUP=max(_MIN_HEADS, _power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK=_BLOCK if head_dim <= 128 else _BLOCK // 2,
        PARTS=parts,
        HAS_WINDOW=window is not None,
        HAS_CAP=softcap is not None,
        PRECISION="ieee",
        num_warps=4,
        num_stages=3 if query.dtype != torch.float32 else 2,
    )
    if parts > 1:
        add_parts: Any = decode_kernels.add_parts
        add_parts[rows, heads](
            partial,
            sums,
            sums[1],
            out,
            heads,
            HEAD_DIM=head_dim,
            PARTS=parts,
            PADDED_PARTS=_power_of_2(parts),
            num_warps=1,
        )
    return out


def _power_of_2(count: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (count - 1).bit_length()
