"""Causal attention over packed sequences, registered in Transformers under the name ``verl_packed``.

A packed row is the concatenation of several sequences. Each token attends only to itself and earlier tokens of its own
sequence, so there is no padding and no mask of (tokens x tokens).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from verl.backends.cpu.kernels import cpu_kernels
from verl.backends.cpu.layer_functions import packed_attention
from verl.base.device_copies import to_device
from verl.errors import ConfigError
from verl.utils.transformers_private import ALL_ATTENTION_FUNCTIONS
from verl.utils.ulysses import gather_heads_scatter_seq, heads_for_sequence

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "verl_packed"

_HALF = (torch.float16, torch.bfloat16)  # the only formats of FlashAttention
_MAX_HEAD_DIM = 256  # of FlashAttention 2


@dataclass(frozen=True)
class Packing:
    """Bounds of the sequences in a packed row."""

    lengths: tuple[int, ...]
    """Number of tokens of each sequence, at least 1."""
    cu_seqlens: Tensor
    """(sequences + 1,) int32 cumulative sums of ``lengths``, starting with 0, on the device of the row."""
    keys: Packing | None = None
    """Bounds of keys and values, where sequences have some from before their queries; None: those of the queries."""
    key_parts: tuple[int, ...] | None = None
    """Indices of the row's sequences in the order in which ``keys`` has their keys and values: a sequence that
    continues another one comes after a copy of the other. None: keys and values have the layout of ``keys`` already."""
    group: dist.ProcessGroup | None = None
    """Ranks that each hold an equal part of the row (:mod:`verl.utils.ulysses`); None: this rank holds all of it."""

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device, keys: Packing | None = None) -> Packing:
        """Make the packing for sequences of these lengths."""
        sums = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), to_device(sums, device), keys)

    @classmethod
    def continuing(cls, lengths: list[int], before: Sequence[int | None], device: torch.device) -> Packing:
        """Make the packing of a row in which some sequences continue another one.

        ``before`` has for each sequence the number of the one that it continues, such as the prompt of a response, or
        None. That one's keys and values are copied, and autograd adds up the gradients of the copies.
        """
        if all(other is None for other in before):
            return cls.from_lengths(lengths, device)
        key_parts = [[i] if other is None else [other, i] for i, other in enumerate(before)]
        keys = cls.from_lengths([sum(lengths[index] for index in indices) for indices in key_parts], device)
        return replace(
            cls.from_lengths(lengths, device, keys),
            key_parts=tuple(index for indices in key_parts for index in indices),
        )

    def followed_by(self, length: int, device: torch.device) -> Packing:
        """Return the packing of the row with one more sequence at its end, of at least one token."""
        longer = Packing.from_lengths(
            [*self.lengths, length], device, self.keys and self.keys.followed_by(length, device)
        )
        parts = None if self.key_parts is None else (*self.key_parts, len(self.lengths))
        return replace(longer, key_parts=parts, group=self.group)

    def to(self, device: torch.device) -> Packing:
        """Move the bounds to ``device``."""
        return replace(self, cu_seqlens=to_device(self.cu_seqlens, device), keys=self.keys and self.keys.to(device))

    @property
    def longest(self) -> int:
        """Largest number of keys of a sequence."""
        return max(self.lengths if self.keys is None else self.keys.lengths)

    def lay_out_keys(self, x: Tensor, dim: int) -> Tensor:
        """Lay out keys or values of the row's tokens, along ``dim``, as ``keys`` says."""
        if self.key_parts is None:
            return x
        # Parts instead of an index, whose backward pass would add in no fixed order on a GPU.
        parts = x.split(self.lengths, dim=dim)
        return torch.cat([parts[part] for part in self.key_parts], dim=dim)


@dataclass(frozen=True)
class AttentionRule:
    """Settings of causal attention in one layer."""

    scale: float
    """Factor of the scores."""
    dropout: float = 0.0
    """Dropout probability of the attention weights."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None is all."""
    softcap: float | None = None
    """c in scores → c · tanh(scores / c); None applies no cap."""


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
    **extras: object,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, with the signature that Transformers expects.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, head_dim).
        key: (1, kv_heads, keys, head_dim); with ``packing.key_parts`` as many as tokens.
        value: (1, kv_heads, keys, head_dim), likewise.
        attention_mask: must be None; ``packing`` takes its place.
        packing: the sequences of the row. If several ranks share it, tensors have this rank's part of the tokens.
        scaling: factor of the scores, by default 1 / sqrt(head_dim).
        dropout: dropout probability of the attention weights.
        sliding_window: number of tokens that a token attends to, itself included; None is all.
        softcap: c in scores → c · tanh(scores / c); None applies no cap.
        extras: other arguments that Transformers passes; those that would change the result are refused.

    Returns:
        (1, tokens, heads, head_dim), and None for the attention weights.

    Raises:
        ConfigError: the layer needs something that packed attention lacks: attention sinks, a position bias, a mask,
            attention to later tokens.
    """
    if packing is None:
        raise ConfigError(f"{type(module).__name__} cannot run packed (it needs padded input).")
    refuse_unsupported(module, "packed", attention_mask, extras)
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    rule = AttentionRule(query.shape[-1] ** -0.5 if scaling is None else scaling, dropout, window, softcap)
    if packing.group is None:
        return attend_packed(query, key, value, packing, rule), None
    q, k, v = heads_for_sequence((query, key, value), packing.group)
    return gather_heads_scatter_seq(attend_packed(q, k, v, packing, rule), 2, 1, packing.group), None


def refuse_unsupported(
    module: nn.Module, how: str, attention_mask: Tensor | None, extras: Mapping[str, object]
) -> None:
    """Raise ConfigError if a layer needs what our attention lacks: sinks, a position bias, a mask, later tokens."""
    unsupported = [name for name in ("s_aux", "position_bias") if extras.get(name) is not None]
    unsupported += ["attention_mask"] if attention_mask is not None else []
    unsupported += [] if getattr(module, "is_causal", True) else ["attention to later tokens"]
    if unsupported:
        raise ConfigError(f"{type(module).__name__} cannot run {how} (it needs {', '.join(unsupported)}).")


def attend_packed(query: Tensor, key: Tensor, value: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
    """Attend over a whole packed row; (1, heads, tokens, head_dim) to (1, tokens, heads, head_dim)."""
    key, value = packing.lay_out_keys(key, 2), packing.lay_out_keys(value, 2)
    kernel = _varlen_kernel(query, value.shape[-1], rule)
    # Which query a GPU kernel takes for the last one depends on its version. A check of the model covers key_parts.
    is_checked = packing.keys is None or packing.key_parts is not None
    if kernel is not None and (is_checked or kernel is _compiled):
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (tokens, heads, head_dim)
        try:
            return kernel(q, k, v, packing, rule).unsqueeze(0)
        except TypeError as error:  # or a caller would take it for a model that cannot run packed
            raise RuntimeError(f"the attention kernel {kernel.__name__} refuses its arguments: {error}") from error
    if packing.keys is None and len(set(packing.lengths)) == 1:
        # (sequences, heads, length, head_dim), one call for all
        q, k, v = (x.squeeze(0).unflatten(1, (-1, packing.longest)).transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v, rule).transpose(1, 2).flatten(0, 1).unsqueeze(0)
    key_lengths = (packing.keys or packing).lengths
    parts = zip((query, key, value), (packing.lengths, key_lengths, key_lengths), strict=True)
    pieces = zip(*(x.split(lengths, dim=2) for x, lengths in parts), strict=True)
    return torch.cat([attend(q, k, v, rule).transpose(1, 2) for q, k, v in pieces], dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, real: Tensor | None = None) -> Tensor:
    """Compute causal attention for sequences of equal length, (sequences, heads, length, head_dim).

    If there are fewer queries than keys, they are of the last tokens. ``real``, (sequences, keys), is False for
    padding, whose outputs are any finite numbers.
    """
    before = k.shape[2] - q.shape[2]
    window = rule.window if rule.window is not None and rule.window < k.shape[2] else None
    visible = None
    if before or window is not None or rule.softcap is not None or real is not None:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
        visible = visible if window is None else visible.triu(before + 1 - window)
    if real is not None and visible is not None:
        # A token always sees itself: a row that saw nothing would be NaN.
        visible = (visible & real[:, None, None, :]) | torch.eye(len(visible), dtype=torch.bool, device=q.device)
    grouped = q.shape[1] != k.shape[1]
    # Of PyTorch's kernels for GPUs that do not keep all (queries x keys) scores, flash takes neither fp32 nor a mask,
    # and the memory-efficient one takes no grouped heads.
    takes_flash = q.dtype in _HALF and visible is None
    if grouped and (rule.softcap is not None or not (takes_flash or q.device.type == "cpu")):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    if rule.softcap is None or visible is None:
        return functional.scaled_dot_product_attention(
            q, k, v, visible, rule.dropout, is_causal=visible is None, scale=rule.scale, enable_gqa=grouped
        )
    scores = q @ k.transpose(2, 3) * rule.scale
    scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = scores.masked_fill(~visible, float("-inf")).float().softmax(-1).to(q.dtype)
    return functional.dropout(weights, rule.dropout) @ v


VarlenKernel = Callable[[Tensor, Tensor, Tensor, Packing, AttentionRule], Tensor]
"""Function that attends over a whole packed row; queries, keys and values are (tokens, heads, head_dim)."""


def _varlen_kernel(query: Tensor, value_dim: int, rule: AttentionRule) -> VarlenKernel | None:
    """Return a kernel for this device, format and rule, if there is one."""
    head_dim, dtype = query.shape[-1], query.dtype
    if head_dim != value_dim:
        return None
    if query.device.type == "cpu":
        is_plain = rule.softcap is None and not rule.dropout
        return _compiled if dtype is torch.float32 and is_plain and cpu_kernels() is not None else None
    if query.device.type != "cuda" or dtype not in _HALF or head_dim > _MAX_HEAD_DIM:
        return None
    if _imports_flash_attn():
        return _flash_attn
    return _torch_varlen() if rule.softcap is None else None


@cache
def _imports_flash_attn() -> bool:
    """Return whether FlashAttention 2 can be imported; version 4 is a package of that name without its functions."""
    if find_spec("flash_attn") is None:
        return False
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        logger.warning("flash_attn is installed but not used (%s): PyTorch's own kernel is used instead.", error)
        return False
    return True


def _compiled(q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
    key_starts = None if packing.keys is None else packing.keys.cu_seqlens
    return packed_attention(q, k, v, packing.cu_seqlens, rule.scale, rule.window, key_starts)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_k=(packing.keys or packing).cu_seqlens,
        max_seqlen_q=max(packing.lengths),
        max_seqlen_k=packing.longest,
        dropout_p=rule.dropout,
        softmax_scale=rule.scale,
        causal=True,
        window_size=(-1, -1) if rule.window is None else (rule.window - 1, 0),
        softcap=rule.softcap or 0.0,
    )


@cache
def _torch_varlen() -> VarlenKernel | None:
    """Return PyTorch's variable-length attention, if this build and this GPU have it."""
    # It is FlashAttention too, which needs an Ampere GPU or a newer one.
    if find_spec("torch.nn.attention.varlen") is None or torch.cuda.get_device_capability() < (8, 0):
        return None
    from torch.nn.attention.varlen import varlen_attn

    return _varlen_kernel_of(varlen_attn)


def _varlen_kernel_of(varlen_attn: Callable[..., object]) -> VarlenKernel:
    """Wrap a ``varlen_attn`` of PyTorch 2.11 or newer; 2.11 does not take ``enable_gqa``."""
    takes_grouped_heads = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def torch_varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        if rule.dropout:
            raise ConfigError("attention dropout needs flash-attn; install it, or set attention_dropout=0.")
        group_size = q.shape[1] // k.shape[1]
        if group_size > 1 and not takes_grouped_heads:
            k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
        grouping = {"enable_gqa": group_size > 1} if takes_grouped_heads else {}
        output = varlen_attn(
            q,
            k,
            v,
            packing.cu_seqlens,
            (packing.keys or packing).cu_seqlens,
            max(packing.lengths),
            packing.longest,
            scale=rule.scale,
            window_size=(-1 if rule.window is None else rule.window - 1, 0),
            **grouping,
        )
        return cast(Tensor, output)

    return torch_varlen


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention_forward)
