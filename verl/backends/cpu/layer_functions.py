"""The parts of a decoder layer as autograd functions over compiled kernels, in fp32 on a CPU.

N is the number of tokens, H the hidden size, D the head dimension. Plain PyTorch chains operations that each read and
write a whole activation; these kernels take a few tokens at a time through a part of a layer, within a cache.
Required: fp32 tensors on the CPU, N >= 1, and a C compiler (``cpu_kernels()`` is not None).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from verl.backends.cpu.kernels import CPUKernels, FeedForward, Heads, Linear, Norm, cpu_kernels

if TYPE_CHECKING:
    from verl.base.types import AutogradContext

# With fewer tokens the kernels' rearranged copy of a weight costs more than it gains.
_FEW_ROWS = 64
# A weight of so many elements (a projection to a vocabulary) is not copied.
_LARGE_WEIGHT = 2**26
_HAS_ONEDNN = torch.backends.mkldnn.is_available()  # not in every build, such as those for Apple's processors


def _kernels() -> CPUKernels:
    kernels = cpu_kernels()
    assert kernels is not None
    return kernels


# ---- matrix products ---------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, other: Tensor | None = None) -> Tensor:
    """Compute x Wᵀ + b + other.

    Args:
        x: (..., inputs).
        weight: W, (outputs, inputs).
        bias: b, (outputs,).
        other: (..., outputs).
    """
    # PyTorch uses MKL, which uses the widest instructions on Intel's processors only; ours use what the CPU has.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if len(rows) < _FEW_ROWS or weight.numel() >= _LARGE_WEIGHT or not weight.is_contiguous():
        y = functional.linear(x, weight, bias)
        return y if other is None else other + y
    addend = None if other is None else other.reshape(-1, len(weight)).contiguous()
    return _Linear.apply(rows, weight, bias, addend).view(*x.shape[:-1], len(weight))  # pyright: ignore[reportOptionalMemberAccess]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext[None], x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return _kernels().training.project(x, Linear(weight, bias), other)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[None], *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        *wants, wants_other = ctx.needs_input_grad
        gradients = _kernels().training.project_backward(grads[0].contiguous(), x, Linear(weight, bias), wants)
        return *gradients, grads[0] if wants_other else None


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``functional.linear`` without gradients; in fp32 by oneDNN, faster than MKL also on few rows."""
    if not (_HAS_ONEDNN and x.dtype is torch.float32):
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if extra := _compiled_rows(count) - count:
        rows = functional.pad(rows, (0, 0, 0, extra))
    y = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return y[:count].view(*x.shape[:-1], len(weight))


def _compiled_rows(count: int) -> int:
    """Return the number of rows, at least ``count``, for which a product is compiled.

    oneDNN compiles a product for each number of rows, in milliseconds, and keeps 1,024 of them, of 0.4 MB each: without
    steps each prefill would compile its own, and the process would grow for thousands of conversations. From one power
    of two to the next there are eight steps, of which a product has at most an eighth more rows than were asked for; up
    to 64 rows, where reading the weight takes most of the time, four.
    """
    step = 1 << max(0, (count - 1).bit_length() - (4 if count > 64 else 3))
    return -(-count // step) * step


# ---- norm --------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMS norm y = x / √(mean x² + ε) · (weight + offset) over the last dimension (https://arxiv.org/abs/1910.07467).

    Args:
        x: (..., H).
        norm: weight (H,), ε, and the offset, which is 1 in Gemma.
    """
    return _RMSNorm.apply(x.contiguous(), *norm)  # pyright: ignore[reportReturnType]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext[tuple[float, float]], x: Tensor, weight: Tensor, eps: float, offset: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = eps, offset
        return _kernels().rms_norm(x, Norm(weight, eps, offset))

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[tuple[float, float]], *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradients = _kernels().training.rms_norm_backward(grads[0].contiguous(), x, Norm(weight, *ctx.settings))
        return *gradients, None, None


# ---- feed-forward ------------------------------------------------------------------------------------------------


def feed_forward(x: Tensor, part: FeedForward) -> Tensor:
    """Gated feed-forward layer (act(n Gᵀ) ⊙ n Uᵀ) Wᵀ [+ x] with n = norm(x) (https://arxiv.org/abs/2002.05202).

    The backward pass computes the norm and the activation again; only n Gᵀ and n Uᵀ are saved for it.

    Args:
        x: (..., H).
        part: G, U, W; the norm, if any; and whether x is added.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    norm_weight = None if part.norm is None else part.norm.weight
    y = _FeedForward.apply(rows, norm_weight, part.gate, part.up, part.down, part, torch.is_grad_enabled())
    return y.view(x.shape)  # pyright: ignore[reportOptionalMemberAccess]


NormRule = tuple[float, float]
"""ε and offset."""
FeedForwardRules = tuple[NormRule | None, str, bool]
"""Rule of the norm, name of the activation, and whether x is added."""


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext[FeedForwardRules], x: Tensor, *arguments: Any) -> Tensor:
        *tensors, part, keep = arguments
        y, saved = _kernels().training.feed_forward(x, part, keep)
        ctx.save_for_backward(x, *tensors, saved)
        ctx.settings = part.norm and part.norm[1:], part.activation, part.adds
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[FeedForwardRules], *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, gate, up, down, saved = ctx.saved_tensors
        rule, activation, adds = ctx.settings
        part = FeedForward(gate, up, down, rule and Norm(norm_weight, *rule), activation, adds)
        wants = ctx.needs_input_grad[2:5]
        gradients = _kernels().training.feed_forward_backward(grads[0].contiguous(), x, saved, part, wants)
        return *gradients, None, None


# ---- attention ---------------------------------------------------------------------------------------------------


def attention_inputs(x: Tensor, part: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute a layer's queries, keys and values: norm, projections, norms of heads, rotary position embedding.

    The rotation (https://arxiv.org/abs/2104.09864) turns coordinates j and j + D/2 of a head by the j-th angle.

    Args:
        x: (N, H).
        part: weights of the layer, and cosines and sines of these N tokens.

    Returns:
        q (N, heads, D), k and v (N, kv_heads, D), and x. Use this x for the residual connection: then the kernel adds
        both of its gradients in one pass.
    """
    weights, biases = zip(*part.projections, strict=True)
    norms = [None if norm is None else norm.weight for norm in (part.norm, *(part.head_norms or (None, None)))]
    return _Heads.apply(x.contiguous(), *weights, *biases, *norms, part, torch.is_grad_enabled())  # pyright: ignore[reportReturnType]


HeadRules = tuple[int, Tensor, Tensor, list[NormRule | None]]
"""Size of a head, cosines, sines, and the norms: of the layer, of queries, of keys."""


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext[HeadRules], x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, part, keep = arguments
        q, k, v, saved = _kernels().training.project_heads(x, part, keep)
        ctx.save_for_backward(x, *tensors, saved)
        ctx.settings = part.head_dim, part.cos, part.sin, [n and n[1:] for n in (part.norm, *(part.head_norms or ()))]
        ctx.set_materialize_grads(False)
        return q, k, v, x

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[HeadRules], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *tensors, saved = ctx.saved_tensors
        head_dim, cos, sin, (rule, *head_rules) = ctx.settings
        weights, biases, norms = tensors[:3], tensors[3:6], tensors[6:]
        head_norms: Any = (
            tuple(rule and Norm(w, *rule) for w, rule in zip(norms[1:], head_rules, strict=True))
            if head_rules
            else None
        )
        projections: Any = tuple(map(Linear, weights, biases))
        part = Heads(projections, head_dim, cos, sin, rule and Norm(norms[0], *rule), head_norms)
        head_grads = [
            x.new_zeros(len(x), len(weight) // head_dim, head_dim) if grad is None else grad.contiguous()
            for grad, weight in zip(grads[:3], weights, strict=True)
        ]
        other = None if grads[3] is None else grads[3].contiguous()
        wants = any(ctx.needs_input_grad[1:4])
        gradients = _kernels().training.project_heads_backward(head_grads, other, x, saved, part, wants)
        x_grad, weight_grads, bias_grads, norm_grads = gradients
        return x_grad, *weight_grads, *bias_grads, *norm_grads, None, None


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    scale: float,
    window: int | None,
    key_starts: Tensor | None = None,
) -> Tensor:
    """Causal attention within each sequence of a packed row, (N, heads, D); see :meth:`CPUKernels.attention_forward`.

    It is differentiable; the backward pass computes the attention weights again.
    """
    q, k, v = (x.contiguous() for x in (q, k, v))
    key_starts = None if key_starts is None else key_starts.long()
    return _PackedAttention.apply(q, k, v, starts.long(), key_starts, scale, window)  # pyright: ignore[reportReturnType]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext[tuple[float, int | None]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        key_starts: Tensor | None,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out, log_sums = _kernels().attention_forward(query, key, value, starts, scale, window, key_starts)
        ctx.save_for_backward(query, key, value, starts, key_starts, out, log_sums)
        ctx.settings = scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext[tuple[float, int | None]], *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, starts, key_starts, out, log_sums = ctx.saved_tensors
        grad = grads[0].contiguous()
        scale, window = ctx.settings
        gradients = _kernels().attention_backward(
            grad, out, log_sums, query, key, value, starts, scale, window, key_starts
        )
        return *gradients, None, None, None, None
