"""Triton kernels of :mod:`verl.backends.cuda.decode_attention`. Arguments that end in ``_at`` are addresses."""

# Without "from __future__ import annotations": Triton reads the annotations of its arguments.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

import triton
import triton.language as tl


@triton.jit
def _capped(scores, cap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        doubled = 2 * scores / cap  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = cap * (1 - 2 / (tl.exp(doubled) + 1))
    return scores


@triton.jit
def attend(
    query_at,
    key_at,
    value_at,
    keys_at,
    values_at,
    positions_at,
    out_at,
    partial_at,
    sums_at,
    largest_at,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    keys_row,
    keys_head,
    keys_token,
    values_row,
    values_head,
    values_token,
    scale,
    window,
    cap,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    before = tl.load(positions_at + row)
    first = before * 0  # of the same type in both cases
    if HAS_WINDOW:
        first = tl.maximum(before - window + 1, 0)
    in_part = tl.cdiv(tl.cdiv(before - first, PARTS), BLOCK) * BLOCK
    start = first + part * in_part
    end = tl.minimum(before, start + in_part)

    members, dims, tokens = tl.arange(0, PADDED_GROUP), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK)
    is_member = (members < GROUP)[:, None]
    heads = head * GROUP + members
    query = tl.load(query_at + row * query_row + heads[:, None] * query_head + dims[None], mask=is_member, other=0.0)
    largest = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    summed = tl.zeros((PADDED_GROUP, HEAD_DIM), tl.float32)
    keys_base = keys_at + row * keys_row + head * keys_head
    values_base = values_at + row * values_row + head * values_head
    for at in range(start, end, BLOCK):
        token = at + tokens
        is_read = token < end
        key = tl.load(keys_base + token[:, None] * keys_token + dims[None], mask=is_read[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(is_read[None], _capped(scores, cap, HAS_CAP), float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - larger[:, None])
        shrunk = tl.exp(largest - larger)
        total = total * shrunk + tl.sum(weights, 1)
        value = tl.load(values_base + token[:, None] * values_token + dims[None], mask=is_read[:, None], other=0.0)
        summed = summed * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        largest = larger
    if part == PARTS - 1:  # the new token, from registers
        key = tl.load(key_at + row * key_row + head * key_head + dims)
        value = tl.load(value_at + row * value_row + head * value_head + dims)
        tl.store(keys_base + before * keys_token + dims, key)
        tl.store(values_base + before * values_token + dims, value)
        scores = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None], 1) * scale
        scores = _capped(scores, cap, HAS_CAP)
        larger = tl.maximum(largest, scores)
        weights, shrunk = tl.exp(scores - larger), tl.exp(largest - larger)
        total = total * shrunk + weights
        summed = summed * shrunk[:, None] + weights[:, None] * value.to(tl.float32)[None]
        largest = larger
    head_index = row * (GROUP * tl.num_programs(1)) + heads
    if PARTS == 1:
        out = (summed / total[:, None]).to(out_at.dtype.element_ty)
        tl.store(out_at + head_index[:, None] * HEAD_DIM + dims[None], out, mask=is_member)
    else:
        head_index = head_index * PARTS + part
        tl.store(partial_at + head_index[:, None] * HEAD_DIM + dims[None], summed, mask=is_member)
        tl.store(sums_at + head_index, total, mask=members < GROUP)
        tl.store(largest_at + head_index, largest, mask=members < GROUP)


@triton.jit
def add_parts(
    partial_at,
    sums_at,
    largest_at,
    out_at,
    heads,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):
    head_index = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    parts, dims = tl.arange(0, PADDED_PARTS), tl.arange(0, HEAD_DIM)
    is_part = parts < PARTS
    largest = tl.load(largest_at + head_index * PARTS + parts, mask=is_part, other=float("-inf"))
    weights = tl.exp(largest - tl.max(largest, 0))
    total = tl.sum(weights * tl.load(sums_at + head_index * PARTS + parts, mask=is_part, other=0.0), 0)
    summed = tl.load(
        partial_at + (head_index * PARTS + parts)[:, None] * HEAD_DIM + dims[None], mask=is_part[:, None], other=0.0
    )
    out = tl.sum(summed * weights[:, None], 0) / total
    tl.store(out_at + head_index * HEAD_DIM + dims, out.to(out_at.dtype.element_ty))
