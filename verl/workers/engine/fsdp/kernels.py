"""The layers of a decoder as few, large operations with hand-written backward passes, for CPUs.

Here N is tokens, H the hidden size, D the head dimension. Plain PyTorch chains many operations that each read and write
a whole activation, and keeps what each of them might need. These functions compute the same numbers in few passes,
keep little, and give every matrix product to the library that is fastest at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_LEAST_PRODUCT = 2**24
"""Multiplications from which oneDNN's set-up (about a millisecond for a new shape) is repaid."""
_CHUNK_ELEMENTS = 2**22
"""Activations of a feed-forward layer that are worked on at once: enough for fast products, few enough for a cache."""

# ---- matrix products ---------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, as ``functional.linear``.

    In fp32 PyTorch gives matrix products to MKL and convolutions to oneDNN. A product is a convolution with a kernel
    of one point, and oneDNN's code for it uses the processor's widest instructions whoever made the processor.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,), or None.
    """
    if not _by_convolution(x, weight):
        return functional.linear(x, weight, bias)
    y = functional.conv2d(_as_image(x), weight[:, :, None, None], bias)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


def _linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x Wᵀ by x and W, all of two dimensions; None where not wanted."""
    if not _by_convolution(x, weight):
        return grad @ weight if wants[0] else None, grad.t() @ x if wants[1] else None
    of_x, of_weight, _ = torch.ops.aten.convolution_backward(
        _as_image(grad),
        _as_image(x),
        weight[:, :, None, None],
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        [*wants, False],
    )
    return (
        of_x.permute(0, 2, 3, 1).reshape(x.shape) if wants[0] else None,
        of_weight.reshape(weight.shape) if wants[1] else None,
    )


def _by_convolution(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * len(weight) >= _LEAST_PRODUCT
        and torch.backends.mkldnn.is_available()
    )


def _as_image(x: Tensor) -> Tensor:
    """(..., C) as an image of one line with C channels, channels last: the same memory."""
    return x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)


# ---- norm --------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """y = x / √(mean x² + ε) · w over the last dimension, inside in fp32 (https://arxiv.org/abs/1910.07467).

    Args:
        x: (..., H).
        weight: (H,).
        eps: ε.
        one_plus: the factor is 1 + w (Gemma) and is applied before the result is rounded.
    """
    return _RMSNorm.apply(x, weight, eps, one_plus)  # pyright: ignore[reportReturnType]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.one_plus = one_plus
        if one_plus:
            return (_wide(x) * inverse).mul_(1 + _wide(weight)).to(x.dtype)
        return (_wide(x) * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        factor = _wide(weight) + 1 if ctx.one_plus else _wide(weight)
        of_x, of_factor = _rms_backward(_wide(grads[0]), _wide(x), inverse, factor)
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
ACTIVATIONS: dict[str, _Activation] = {
    "silu": (functional.silu, _silu_backward),
    "gelu_pytorch_tanh": (_gelu_tanh, _gelu_tanh_backward),
}
"""By their names in Transformers configs."""


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str = "silu") -> Tensor:
    """(act(x Gᵀ) ⊙ x Uᵀ) Wᵀ, a gated feed-forward layer (https://arxiv.org/abs/2002.05202).

    One product makes both halves. Only these are kept: the backward pass computes the activation again.

    Args:
        x: (..., H).
        gate: G, (inner, H).
        up: U, (inner, H).
        down: W, (H, inner).
        activation: one of ``ACTIVATIONS``.
    """
    y = _GatedMLP.apply(x.reshape(-1, x.shape[-1]), gate, up, down, activation, torch.is_grad_enabled())
    return y.view(*x.shape[:-1], len(down))  # pyright: ignore[reportOptionalMemberAccess]


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str, keep: bool) -> Tensor:
        act, _ = ACTIVATIONS[activation]
        inner, fused = len(gate), torch.cat([gate, up])
        y = x.new_empty(len(x), len(down))
        halves = []
        for part in _chunks(len(x), 2 * inner):
            both = linear(x[part], fused)
            y[part] = linear(act(both[:, :inner]).mul_(both[:, inner:]), down)
            if keep:
                halves.append(both)
        ctx.save_for_backward(x, gate, up, down, *halves)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, *halves = ctx.saved_tensors
        act, act_backward = ACTIVATIONS[ctx.activation]
        wants = ctx.needs_input_grad
        inner, fused = len(gate), torch.cat([gate, up])
        of_x = torch.empty_like(x) if wants[0] else None
        of_fused, of_down = torch.zeros_like(fused), torch.zeros_like(down)
        for part, both in zip(_chunks(len(x), 2 * inner), halves, strict=True):
            a, b = both[:, :inner], both[:, inner:]
            active = act(a)
            of_hidden, weight_part = _linear_backward(grads[0][part], active * b, down, (True, wants[3]))
            assert of_hidden is not None
            if weight_part is not None:
                of_down += weight_part
            of_both = torch.empty_like(both)
            torch.mul(of_hidden, active, out=of_both[:, inner:])
            act_backward(of_hidden.mul_(b), a, of_both[:, :inner])
            x_part, weight_part = _linear_backward(of_both, x[part], fused, (wants[0], wants[1] or wants[2]))
            if of_x is not None and x_part is not None:
                of_x[part] = x_part
            if weight_part is not None:
                of_fused += weight_part
        of_gate, of_up = of_fused.split(inner)
        of_weights = [of if wanted else None for of, wanted in zip((of_gate, of_up, of_down), wants[1:4], strict=True)]
        return of_x, *of_weights, None, None


def _chunks(rows: int, width: int) -> list[slice]:
    """The rows in as few equal parts as keep within the bound."""
    count = max(1, -(-rows * width // _CHUNK_ELEMENTS))
    size = max(1, -(-rows // count))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


# ---- what attention reads ----------------------------------------------------------------------------------------


class Rotation:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) as complex factors e^{i · position · frequency}.

    Transformers pairs coordinate j of a head with j + D/2. Here the rows of the projections are reordered instead, so
    that a pair is one complex number: the rotation is one product, and the scores q·k do not see the order.

    Args:
        cos: (..., N, D) as Transformers makes them, both halves of D alike.
        sin: as ``cos``.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        half = cos.shape[-1] // 2
        self.factors = torch.complex(*(_wide(x[..., :half]).reshape(-1, 1, half) for x in (cos, sin)))
        """(N, 1, D/2)."""
        self.conjugate = self.factors.conj_physical()

    def rotate(self, x: Tensor, out: Tensor, back: bool = False) -> None:
        """Rotate (N, heads, D), in pairs, into ``out``, by the angle or back."""
        pairs, target = (torch.view_as_complex(t.unflatten(-1, (-1, 2))) for t in (x, out))
        torch.mul(pairs, self.conjugate if back else self.factors, out=target)


def interleaved(heads: int, head_dim: int, device: torch.device) -> Tensor:
    """(heads · D,) rows of a projection in the order 0, D/2, 1, D/2 + 1 ... within each head."""
    one = torch.arange(head_dim, device=device).view(2, -1).t().reshape(1, -1)
    return (one + head_dim * torch.arange(heads, device=device).unsqueeze(1)).reshape(-1)


def attention_inputs(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norms: Sequence[Tensor] | None,
    eps: float,
    rotation: Rotation,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a layer: projected by one product, normed by head, rotated.

    Args:
        x: (N, H).
        weights: of the projections of q, k and v, (heads · D, H) each.
        biases: of the three; all of them, or none.
        norms: (D,) weights of an RMS norm of each head of q and of k, or None.
        eps: ε of that norm.
        rotation: of the N tokens.
        head_dim: D.

    Returns:
        q (N, heads, D), k and v (N, kv_heads, D); the coordinates of q and k in the order of ``interleaved``.
    """
    given = None if biases[0] is None else biases
    pair = (None, None) if norms is None else norms
    q, k, v = _AttentionInputs.apply(x, *weights, *(given or (None,) * 3), *pair, eps, rotation, head_dim)  # pyright: ignore[reportGeneralTypeIssues]
    return q, k, v


class _AttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *parameters, eps, rotation, head_dim = arguments
        weights, biases, norms = parameters[:3], parameters[3:6], parameters[6:]
        shape = _Heads(weights, head_dim)
        fused = shape.fuse(weights)
        projected = linear(x, fused, None if biases[0] is None else shape.fuse(biases))
        projected = projected.view(len(x), -1, head_dim)
        before = projected[:, : shape.rotated]
        inverse, turned = None, before
        if norms[0] is not None:
            inverse = _inverse_rms(before, eps)
            turned = (_wide(before) * inverse).to(x.dtype).mul_(shape.factor(norms))
        rotated = torch.empty(before.shape, dtype=_wide_dtype(x), device=x.device)
        rotation.rotate(_wide(turned), rotated)
        rotated = rotated.to(x.dtype)
        ctx.save_for_backward(x, *weights, *norms, inverse, before if inverse is not None else None)
        ctx.settings = shape, rotation, biases[0] is not None
        q, k = rotated.split([shape.queries, shape.keys], dim=1)
        return q, k, projected[:, shape.rotated :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters, inverse, before = ctx.saved_tensors
        weights, norms = parameters[:3], parameters[3:]
        shape, rotation, has_bias = ctx.settings
        of_projected = torch.empty(
            len(x), shape.rotated + shape.keys, shape.head_dim, dtype=_wide_dtype(x), device=x.device
        )
        of_q, of_k, of_v = of_projected.split([shape.queries, shape.keys, shape.keys], dim=1)
        rotation.rotate(_wide(grads[0]), of_q, back=True)
        rotation.rotate(_wide(grads[1]), of_k, back=True)
        of_v.copy_(grads[2])
        of_norms: list[Tensor | None] = [None, None]
        if inverse is not None:
            turned = of_projected[:, : shape.rotated]
            of_before, of_factor = _rms_backward(turned, _wide(before), inverse, _wide(shape.factor(norms)))
            turned.copy_(of_before)
            of_norms = [part.to(norms[0].dtype) for part in shape.sum_factor(of_factor)]
        flat = of_projected.flatten(1).to(x.dtype)
        wants = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:4])
        of_x, of_fused = _linear_backward(flat, x, shape.fuse(weights), wants)
        of_weights = [None] * 3 if of_fused is None else shape.part(of_fused)
        of_biases = shape.part(flat.sum(0)) if has_bias else [None] * 3
        return of_x, *of_weights, *of_biases, *of_norms, None, None, None


class _Heads:
    """How the rows of the three projections lie in one."""

    def __init__(self, weights: Sequence[Tensor], head_dim: int) -> None:
        self.head_dim = head_dim
        self.queries, self.keys = len(weights[0]) // head_dim, len(weights[1]) // head_dim
        self.rotated = self.queries + self.keys
        self.order = [interleaved(heads, head_dim, weights[0].device) for heads in (self.queries, self.keys)]

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows of q and k, pairs side by side, then those of v."""
        return torch.cat([parts[0][self.order[0]], parts[1][self.order[1]], parts[2]])

    def part(self, fused: Tensor) -> list[Tensor]:
        """What ``fuse`` joined, in the order in which it was."""
        sizes = [heads * self.head_dim for heads in (self.queries, self.keys, self.keys)]
        q, k, v = fused.split(sizes)
        q, k = (part[order.argsort()] for part, order in zip((q, k), self.order, strict=True))
        return [q, k, v]

    def factor(self, norms: Sequence[Tensor]) -> Tensor:
        """(heads of q and k, D): the norm's weights of each head, pairs side by side."""
        order = self.order[0][: self.head_dim]
        return torch.cat([norm[order].expand(n, -1) for norm, n in zip(norms, (self.queries, self.keys), strict=True)])

    def sum_factor(self, of_factor: Tensor) -> list[Tensor]:
        """Gradients of the two norms' weights, from those of ``factor``."""
        back = self.order[0][: self.head_dim].argsort()
        return [part.sum(0)[back] for part in of_factor.split([self.queries, self.keys])]
