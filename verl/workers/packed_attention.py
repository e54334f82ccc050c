"""Causal attention over packed sequences, plugged into Transformers models under the name ``verl_packed``.

A packed row holds sequences one after the other. Each token attends to the earlier tokens of its own
sequence and to nothing else, so no padding is computed and no mask of (tokens x tokens) is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.errors import ConfigError
from verl.utils.cpu_kernels import cpu_kernels

PACKED_ATTENTION = "verl_packed"

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a packed row begin and end."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, none of them 0."""
    cu_seqlens: Tensor
    """(sequences + 1,) int32 running sums of ``lengths`` from 0, on the device of the row."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packing:
        """The packing of sequences of these lengths."""
        sums = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), sums.to(device, non_blocking=True))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)


@dataclass(frozen=True)
class AttentionRule:
    """How tokens attend within their own sequence, to themselves and earlier ones."""

    scale: float
    """Factor of the scores."""
    dropout: float = 0.0
    """Of the attention weights."""
    window: int | None = None
    """Tokens that a token sees, itself included; None is all."""
    softcap: float | None = None
    """c in scores → c · tanh(scores / c); None leaves them."""


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the form that Transformers calls.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, head_dim).
        key: (1, kv_heads, tokens, head_dim).
        value: as ``key``.
        attention_mask: None; who sees whom follows from ``packing``.
        packing: the sequences of the row.
        scaling: factor of the scores, by default 1 / sqrt(head_dim).
        dropout: of the attention weights.
        sliding_window: tokens that a token sees, itself included; None is all.
        softcap: c in scores → c · tanh(scores / c); None leaves them.
        extras: what Transformers hands to every attention; a term that changes the result is refused.

    Returns:
        (1, tokens, heads, head_dim), and no attention weights.

    Raises:
        ConfigError: the layer needs something that packing does not have (attention sinks, a bias by
            position, a mask of its own).
    """
    wanted = [name for name in ("s_aux", "position_bias") if extras.get(name) is not None]
    wanted += ["attention_mask"] if attention_mask is not None else []
    if packing is None or wanted or not getattr(module, "is_causal", True):
        raise ConfigError(
            f"{type(module).__name__} cannot run packed (it needs {', '.join(wanted) or 'padded input'})."
        )
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    rule = AttentionRule(query.shape[-1] ** -0.5 if scaling is None else scaling, dropout, window, softcap)
    kernel = _varlen_kernel(query, value.shape[-1], rule)
    if kernel is not None:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (tokens, heads, head_dim)
        return kernel(q, k, v, packing, rule).unsqueeze(0), None
    if len(set(packing.lengths)) == 1:  # a rectangle: one call for all
        q, k, v = (_fold(x, packing.longest) for x in (query, key, value))
        return _attend(q, k, v, rule).transpose(1, 2).flatten(0, 1).unsqueeze(0), None
    pieces = zip(*(x.split(packing.lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([_attend(q, k, v, rule).transpose(1, 2) for q, k, v in pieces], dim=1), None


def _fold(x: Tensor, length: int) -> Tensor:
    """(1, heads, sequences · length, D) to (sequences, heads, length, D)."""
    return x.squeeze(0).transpose(0, 1).unflatten(0, (-1, length)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Causal attention inside sequences of one length, (sequences, heads, length, head_dim)."""
    grouped = q.shape[1] != k.shape[1]
    length = q.shape[2]
    band = None
    if rule.window is not None and rule.window < length:
        ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
        band = ones.tril().triu(1 - rule.window)
    if rule.softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, band, rule.dropout, is_causal=band is None, scale=rule.scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * rule.scale
    scores = rule.softcap * torch.tanh(scores / rule.softcap)
    visible = band if band is not None else torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~visible, float("-inf")).float().softmax(-1).to(q.dtype)
    return functional.dropout(weights, rule.dropout) @ v


@contextmanager
def short_windows(model: nn.Module, tokens: int) -> Iterator[None]:
    """Sliding windows of at most ``tokens`` inside, in the layers and in the configs that masks are made from.

    A short text then shows whether attention is told of a layer's window, or only a mask that packing does not use.
    """
    owners: list[Any] = [owner for module in model.modules() for owner in (module, getattr(module, "config", None))]
    found = {id(owner): owner for owner in owners if _window_of(owner) > tokens}
    before = [(owner, owner.sliding_window) for owner in found.values()]
    try:
        for owner, _ in before:
            owner.sliding_window = tokens
        yield
    finally:
        for owner, window in before:
            owner.sliding_window = window


def _window_of(owner: Any) -> int:
    window = getattr(owner, "sliding_window", None)
    return window if isinstance(window, int) else 0


VarlenKernel = Callable[[Tensor, Tensor, Tensor, Packing, AttentionRule], Tensor]
"""Attention of a whole packed row at once: queries, keys and values are (tokens, heads, head_dim)."""


def _varlen_kernel(query: Tensor, value_dim: int, rule: AttentionRule) -> VarlenKernel | None:
    """A kernel for this case, if there is one."""
    head_dim, dtype = query.shape[-1], query.dtype
    if head_dim != value_dim:
        return None
    if query.device.type == "cpu":
        is_plain = rule.softcap is None and not rule.dropout
        return _compiled if dtype is torch.float32 and is_plain and cpu_kernels() is not None else None
    if query.device.type != "cuda" or dtype not in _HALF or head_dim > 256:
        return None
    if find_spec("flash_attn") is not None:
        return _flash_attn
    return _torch_varlen() if rule.softcap is None else None


def _compiled(q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
    rows = (x.contiguous() for x in (q, k, v))
    return _CompiledAttention.apply(*rows, packing.cu_seqlens.long(), rule.scale, rule.window)  # pyright: ignore[reportReturnType]


class _CompiledAttention(torch.autograd.Function):
    """Our own kernels for fp32 on a CPU; the backward pass computes the weights again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, window: int | None
    ) -> Tensor:
        kernels = cpu_kernels()
        assert kernels is not None
        out, log_sums = kernels.attention_forward(query, key, value, starts, scale, window)
        ctx.save_for_backward(query, key, value, starts, out, log_sums)
        ctx.settings = kernels, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, starts, out, log_sums = ctx.saved_tensors
        kernels, scale, window = ctx.settings
        grad = grads[0].contiguous()
        found = kernels.attention_backward(grad, out, log_sums, query, key, value, starts, scale, window)
        return *found, None, None, None


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_k=packing.cu_seqlens,
        max_seqlen_q=packing.longest,
        max_seqlen_k=packing.longest,
        dropout_p=rule.dropout,
        softmax_scale=rule.scale,
        causal=True,
        window_size=(-1, -1) if rule.window is None else (rule.window - 1, 0),
        softcap=rule.softcap or 0.0,
    )


@cache
def _torch_varlen() -> VarlenKernel | None:
    """PyTorch's own variable-length attention, where this build and this GPU have it."""
    if find_spec("torch.nn.attention.varlen") is None or torch.cuda.get_device_capability() < (8, 0):
        return None
    from torch.nn.attention.varlen import varlen_attn

    def kernel(q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        if rule.dropout:
            raise ConfigError("attention dropout needs flash-attn; install it, or set attention_dropout=0.")
        output = varlen_attn(
            q,
            k,
            v,
            packing.cu_seqlens,
            packing.cu_seqlens,
            packing.longest,
            packing.longest,
            scale=rule.scale,
            window_size=(-1 if rule.window is None else rule.window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return cast(Tensor, output)

    return kernel


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention_forward)
