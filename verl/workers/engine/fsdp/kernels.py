"""The layers of a decoder as few, large operations with hand-written backward passes, for CPUs.

Here N is tokens, H the hidden size, D the head dimension. Plain PyTorch chains many operations that each read and write
a whole activation, and keeps what each of them might need. These functions compute the same numbers and keep little.
In fp32 they are our compiled kernels (:mod:`verl.utils.cpu_kernels`), which take a few tokens through a whole part of
the layer while those are in a cache; in other dtypes, and without a C compiler, few operations of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from verl.utils.cpu_kernels import CPUKernels, FeedForward, Heads, Linear, Norm, cpu_kernels

_CHUNK_ELEMENTS = 2**22
"""Activations of a feed-forward layer that PyTorch works on at once: many for fast products, few for a cache."""
_FEW_ROWS = 64
"""Fewer tokens do not repay the kernels' way of laying out a weight."""
_LARGE_WEIGHT = 2**26
"""A weight of so many elements is not laid out a second time: a projection to a vocabulary."""


def _kernels_for(*tensors: Tensor | None) -> CPUKernels | None:
    """The compiled kernels, if all of these tensors are such as they take."""
    given = [tensor for tensor in tensors if tensor is not None]
    if all(x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() and x.is_contiguous() for x in given):
        return cpu_kernels()
    return None


def _kernels() -> CPUKernels:
    found = cpu_kernels()
    assert found is not None
    return found


# ---- matrix products ---------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, other: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, as ``functional.linear``, to which ``other`` is added.

    In fp32 PyTorch gives it to MKL, whose widest instructions are for processors of its own maker only; ours use those
    that there are.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,), or None.
        other: (..., outputs), or None.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    others = None if other is None else other.reshape(-1, len(weight)).contiguous()
    is_large = len(rows) >= _FEW_ROWS and weight.numel() < _LARGE_WEIGHT
    if not is_large or _kernels_for(rows, weight, bias, others) is None:
        y = functional.linear(x, weight, bias)
        return y if other is None else other + y
    return _CompiledLinear.apply(rows, weight, bias, others).view(*x.shape[:-1], len(weight))  # pyright: ignore[reportOptionalMemberAccess]


class _CompiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return _kernels().training.project(x, Linear(weight, bias), other)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        *wants, wants_other = ctx.needs_input_grad
        found = _kernels().training.project_backward(grads[0].contiguous(), x, Linear(weight, bias), wants)
        return *found, grads[0] if wants_other else None


# ---- norm --------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """y = x / √(mean x² + ε) · f over the last dimension, inside in fp32 (https://arxiv.org/abs/1910.07467).

    Args:
        x: (..., H).
        norm: f is its weight (H,) plus its offset; with an offset (Gemma's is 1) f is applied before y is rounded.
    """
    rows = x.contiguous()
    way = _RMSNorm if _kernels_for(rows, norm.weight) is None else _CompiledRMSNorm
    return way.apply(rows, norm.weight, norm.eps, norm.offset)  # pyright: ignore[reportReturnType]


class _CompiledRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = eps, offset
        return _kernels().rms_norm(x, Norm(weight, eps, offset))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        found = _kernels().training.rms_norm_backward(grads[0].contiguous(), x, Norm(weight, *ctx.settings))
        return *found, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        if offset:
            return (_wide(x) * inverse).mul_(offset + _wide(weight)).to(x.dtype)
        return (_wide(x) * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        of_x, of_factor = _rms_backward(_wide(grads[0]), _wide(x), inverse, _wide(weight) + ctx.offset)
        return of_x.to(x.dtype), of_factor.to(weight.dtype), None, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide_dtype(x))
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _rms_backward(grad: Tensor, x: Tensor, inverse: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x · inverse · factor by x and, summed over the dimensions that it lacks, by ``factor``.

    With n = x · inverse:  ∂x = (g·f - n · mean(g·f·n)) · inverse,  ∂f = Σ g·n.
    """
    normed = x * inverse
    product = grad * normed
    of_factor = product.flatten(0, -1 - factor.dim()).sum(0)
    mean = product.mul_(factor).mean(-1, keepdim=True)
    return torch.mul(grad, factor).addcmul_(normed, mean, value=-1).mul_(inverse), of_factor


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


# ---- feed-forward ------------------------------------------------------------------------------------------------


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _silu_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)


def _gelu_tanh_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=out)


_Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], None]]
_ACTIVATIONS: dict[str, _Activation] = {
    "silu": (functional.silu, _silu_backward),
    "gelu": (_gelu_tanh, _gelu_tanh_backward),
}


def feed_forward(x: Tensor, part: FeedForward) -> Tensor:
    """(act(n Gᵀ) ⊙ n Uᵀ) Wᵀ of n = norm(x), a gated feed-forward layer (https://arxiv.org/abs/2002.05202), [plus x].

    Only n Gᵀ and n Uᵀ are kept: the backward pass computes the norm and the activation again.

    Args:
        x: (..., H).
        part: G, U, W, and whether there is a norm before them and x is added after them.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    weights = part.gate, part.up, part.down
    norm_weight = None if part.norm is None else part.norm.weight
    if _kernels_for(rows, norm_weight, *weights) is not None:
        y = _CompiledFeedForward.apply(rows, norm_weight, *weights, part, torch.is_grad_enabled())
        return y.view(x.shape)  # pyright: ignore[reportOptionalMemberAccess]
    normed = rows if part.norm is None else rms_norm(rows, part.norm)
    y: Any = _GatedMLP.apply(normed, *weights, part.activation, torch.is_grad_enabled())
    return x + y.view(x.shape) if part.adds else y.view(x.shape)


class _CompiledFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        *tensors, part, keep = arguments
        y, kept = _kernels().training.feed_forward(x, part, keep)
        ctx.save_for_backward(x, *tensors, kept)
        ctx.settings = part.norm and part.norm[1:], part.activation, part.adds
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, gate, up, down, kept = ctx.saved_tensors
        rule, activation, adds = ctx.settings
        part = FeedForward(gate, up, down, rule and Norm(norm_weight, *rule), activation, adds)
        wants = ctx.needs_input_grad[2:5]
        found = _kernels().training.feed_forward_backward(grads[0].contiguous(), x, kept, part, wants)
        return *found, None, None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str, keep: bool) -> Tensor:
        act, _ = _ACTIVATIONS[activation]
        inner, fused = len(gate), torch.cat([gate, up])
        y = x.new_empty(len(x), len(down))
        halves = []
        for part in _chunks(len(x), 2 * inner):
            both = functional.linear(x[part], fused)
            y[part] = functional.linear(act(both[:, :inner]).mul_(both[:, inner:]), down)
            if keep:
                halves.append(both)
        ctx.save_for_backward(x, gate, up, down, *halves)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, *halves = ctx.saved_tensors
        act, act_backward = _ACTIVATIONS[ctx.activation]
        wants = ctx.needs_input_grad
        inner, fused = len(gate), torch.cat([gate, up])
        of_x = torch.empty_like(x)
        of_fused, of_down = torch.zeros_like(fused), torch.zeros_like(down)
        for part, both in zip(_chunks(len(x), 2 * inner), halves, strict=True):
            a, b = both[:, :inner], both[:, inner:]
            active, grad = act(a), grads[0][part]
            of_hidden = grad @ down
            if wants[3]:
                of_down.addmm_(grad.t(), active * b)
            of_both = torch.empty_like(both)
            torch.mul(of_hidden, active, out=of_both[:, inner:])
            act_backward(of_hidden.mul_(b), a, of_both[:, :inner])
            of_x[part] = of_both @ fused
            if wants[1] or wants[2]:
                of_fused.addmm_(of_both.t(), x[part])
        of_gate, of_up = of_fused.split(inner)
        of_all = [of if wanted else None for of, wanted in zip((of_x, of_gate, of_up, of_down), wants[:4], strict=True)]
        return *of_all, None, None


def _chunks(rows: int, width: int) -> list[slice]:
    """The rows in as few equal parts as keep within the bound."""
    count = max(1, -(-rows * width // _CHUNK_ELEMENTS))
    size = max(1, -(-rows // count))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


# ---- what attention reads ----------------------------------------------------------------------------------------


def attention_inputs(x: Tensor, part: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of a layer: normed, projected by one product, normed by head, rotated.

    The rotation is a rotary position embedding (https://arxiv.org/abs/2104.09864): in a head, coordinates j and
    j + D/2 are the plane that turns by the j-th angle.

    Args:
        x: (N, H).
        part: of the layer and these N tokens.

    Returns:
        q (N, heads, D), k and v (N, kv_heads, D), and x, for what is added to it: so both of its gradients are added
        up in the one pass.
    """
    x = x.contiguous()
    weights, biases = zip(*part.projections, strict=True)
    norms = [None if norm is None else norm.weight for norm in (part.norm, *(part.head_norms or (None, None)))]
    if _kernels_for(x, *weights, *biases, *norms, part.cos, part.sin) is not None:
        keep = torch.is_grad_enabled()
        return _CompiledHeads.apply(x, *weights, *biases, *norms, part, keep)  # pyright: ignore[reportReturnType]
    normed = x if part.norm is None else rms_norm(x, part.norm)
    q, k, v = _Heads.apply(normed, *weights, *biases, *norms[1:], part)  # pyright: ignore[reportGeneralTypeIssues]
    return q, k, v, x


class _CompiledHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, part, keep = arguments
        q, k, v, kept = _kernels().training.project_heads(x, part, keep)
        ctx.save_for_backward(x, *tensors, kept)
        ctx.settings = part.head_dim, part.cos, part.sin, [n and n[1:] for n in (part.norm, *(part.head_norms or ()))]
        ctx.set_materialize_grads(False)
        return q, k, v, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *tensors, kept = ctx.saved_tensors
        head_dim, cos, sin, (rule, *head_rules) = ctx.settings
        weights, biases, norms = tensors[:3], tensors[3:6], tensors[6:]
        head_norms: Any = (
            tuple(Norm(w, *rule) for w, rule in zip(norms[1:], head_rules, strict=True)) if head_rules else None
        )
        projections: Any = tuple(map(Linear, weights, biases))
        part = Heads(projections, head_dim, cos, sin, rule and Norm(norms[0], *rule), head_norms)
        of_heads = [
            x.new_zeros(len(x), len(weight) // head_dim, head_dim) if grad is None else grad.contiguous()
            for grad, weight in zip(grads[:3], weights, strict=True)
        ]
        other = None if grads[3] is None else grads[3].contiguous()
        wants = any(ctx.needs_input_grad[1:4])
        found = _kernels().training.project_heads_backward(of_heads, other, x, kept, part, wants)
        of_x, of_weights, of_biases, of_norms = found
        return of_x, *of_weights, *of_biases, *of_norms, None, None


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *parameters, part = arguments
        weights, biases, norms = parameters[:3], parameters[3:6], parameters[6:]
        bias = None if biases[0] is None else torch.cat(biases)
        projected = functional.linear(x, torch.cat(weights), bias).view(len(x), -1, part.head_dim)
        queries, keys = (len(weight) // part.head_dim for weight in weights[:2])
        before = projected[:, : queries + keys]
        inverse, turned = None, before
        if part.head_norms is not None:
            inverse = _inverse_rms(before, part.head_norms[0].eps)
            turned = (_wide(before) * inverse).to(x.dtype).mul_(_by_head(norms, queries, keys))
        rotated = _rotate(_wide(turned), part.cos, part.sin).to(x.dtype)
        ctx.save_for_backward(x, *weights, *norms, inverse, before if inverse is not None else None, part.cos, part.sin)
        ctx.has_bias = bias is not None
        q, k = rotated.split([queries, keys], dim=1)
        return q, k, projected[:, queries + keys :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters, inverse, before, cos, sin = ctx.saved_tensors
        weights, norms = parameters[:3], parameters[3:]
        queries, keys, _ = sizes = [grad.shape[1] for grad in grads]
        of_turned = _rotate(_wide(torch.cat(grads[:2], 1)), cos, -sin)
        of_norms: list[Tensor | None] = [None, None]
        if inverse is not None:
            factor = _wide(_by_head(norms, queries, keys))
            of_turned, of_factor = _rms_backward(of_turned, _wide(before), inverse, factor)
            of_norms = [part.sum(0).to(norms[0].dtype) for part in of_factor.split([queries, keys])]
        flat = torch.cat([of_turned, _wide(grads[2])], 1).flatten(1).to(x.dtype)
        rows = [size * grads[0].shape[-1] for size in sizes]
        wants = ctx.needs_input_grad
        of_x = flat @ torch.cat(weights) if wants[0] else None
        of_weights = (flat.t() @ x).split(rows) if any(wants[1:4]) else [None] * 3
        of_biases = flat.sum(0).split(rows) if ctx.has_bias else [None] * 3
        return of_x, *of_weights, *of_biases, *of_norms, None


def _by_head(norms: Sequence[Tensor], queries: int, keys: int) -> Tensor:
    """(heads of q and k, D): the norm's weights of each head."""
    return torch.cat([norm.expand(n, -1) for norm, n in zip(norms, (queries, keys), strict=True)])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(N, heads, D): the halves (a, b) of each head become (a·cos - b·sin, b·cos + a·sin)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = torch.empty_like(x)
    first, second = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return out
