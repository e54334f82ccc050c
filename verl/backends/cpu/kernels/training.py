"""Forward and backward passes of the parts of a decoder layer in training, as calls of the C code.

All tensors must be fp32 and contiguous, and N, the number of tokens, at least 1; nothing checks that. A row's forward
results are bitwise independent of the other rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.backends.cpu.kernels.decoding import Linear, Norm, address

_FLOAT, _INT, _INT64, _POINTER = ctypes.c_float, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_FEW_ROWS = 64  # minimum rows per thread: with fewer, another thread costs more than it saves


class FeedForward(NamedTuple):
    """Gated feed-forward layer x ↦ [x +] down · (act(gate · norm(x)) ∘ (up · norm(x)))."""

    gate: Tensor
    """(inner, H)"""
    up: Tensor
    """(inner, H)"""
    down: Tensor
    """(H, inner)"""
    norm: Norm | None = None
    activation: str = "silu"
    """``silu`` or ``gelu`` (tanh approximation)."""
    adds: bool = False
    """Add x to the result."""


class Heads(NamedTuple):
    """Queries, keys and values of norm(x): projections, norms of the heads of q and k, rotation.

    The rotation turns the halves (a, b) of a head into (a·cos - b·sin, b·cos + a·sin).
    """

    projections: tuple[Linear, Linear, Linear]
    """Projections to q, k and v; either all have a bias or none."""
    head_dim: int
    cos: Tensor
    """(N, head_dim / 2)"""
    sin: Tensor
    """(N, head_dim / 2)"""
    norm: Norm | None = None
    head_norms: tuple[Norm, Norm] | None = None
    """Norms of each head of q and of k."""


# ---- the structs; training.c has the same


class NormStruct(ctypes.Structure):
    """``Norm``."""

    _fields_ = (("weight", _POINTER), ("eps", _FLOAT), ("offset", _FLOAT))


class FeedForwardStruct(ctypes.Structure):
    """``FeedForward``."""

    _fields_ = (
        ("norm", NormStruct),
        *((name, _POINTER) for name in ("gate", "up", "down")),
        *((name, _INT64) for name in ("rows", "hidden", "inner", "is_gelu", "adds")),
    )


class HeadsStruct(ctypes.Structure):
    """``Heads``."""

    _fields_ = (
        *((name, NormStruct) for name in ("norm", "q_norm", "k_norm")),
        ("weights", _POINTER * 3),
        ("biases", _POINTER * 3),
        ("cos", _POINTER),
        ("sin", _POINTER),
        *((name, _INT64) for name in ("rows", "hidden", "heads", "kv", "d")),
    )


class ProjectionStruct(ctypes.Structure):
    """``Projection``."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), *((name, _INT64) for name in ("rows", "inputs", "outputs")))


def _norm_struct(norm: Norm | None) -> NormStruct:
    return NormStruct(None, 0.0, 0.0) if norm is None else NormStruct(address(norm.weight), norm.eps, norm.offset)


def _feed_forward_struct(part: FeedForward, x: Tensor) -> FeedForwardStruct:
    weights = map(address, (part.gate, part.up, part.down))
    inner, hidden = part.gate.shape
    return FeedForwardStruct(
        _norm_struct(part.norm), *weights, len(x), hidden, inner, part.activation == "gelu", part.adds
    )


def _heads_struct(part: Heads, x: Tensor) -> HeadsStruct:
    norms = part.norm, *(part.head_norms or (None, None))
    weights, biases = ((_POINTER * 3)(*map(address, tensors)) for tensors in zip(*part.projections, strict=True))
    q, k, _ = part.projections
    sizes = len(x), x.shape[1], len(q.weight) // part.head_dim, len(k.weight) // part.head_dim, part.head_dim
    return HeadsStruct(*map(_norm_struct, norms), weights, biases, address(part.cos), address(part.sin), *sizes)


def _projection_struct(part: Linear, x: Tensor) -> ProjectionStruct:
    outputs, inputs = part.weight.shape
    return ProjectionStruct(address(part.weight), address(part.bias), len(x), inputs, outputs)


# ---- the functions


class TrainingKernels:
    """The compiled functions of training, with tensors as arguments; MemoryError if the workspace does not fit."""

    def __init__(self, library: ctypes.CDLL) -> None:
        part, heads, projection = (
            ctypes.POINTER(struct) for struct in (FeedForwardStruct, HeadsStruct, ProjectionStruct)
        )
        self._saved_size = library.feed_forward_kept
        self._saved_size.argtypes, self._saved_size.restype = [part], _INT64
        self._feed_forward = _with_pointers(library.feed_forward, part, 3)
        self._feed_forward_backward = _with_pointers(library.feed_forward_backward, part, 8)
        self._heads = _with_pointers(library.project_heads, heads, 5)
        self._heads_backward = _with_pointers(library.project_heads_backward, heads, 12)
        self._project = _with_pointers(library.project, projection, 3)
        self._project_backward = _with_pointers(library.project_backward, projection, 5)
        self._norm_backward = library.rms_norm_backward
        self._norm_backward.argtypes = [ctypes.POINTER(NormStruct), *[_POINTER] * 4, _INT64, _INT64, _INT]

    def feed_forward(self, x: Tensor, part: FeedForward, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output (N, H) for x (N, H) and, if ``keep``, the activations that the backward pass needs."""
        struct = _feed_forward_struct(part, x)
        y = torch.empty_like(x)
        saved = x.new_empty(self._saved_size(struct)) if keep else None
        self._feed_forward(struct, y, saved, x)
        return y, saved

    def feed_forward_backward(
        self, grad: Tensor, x: Tensor, saved: Tensor, part: FeedForward, wants: Sequence[bool]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Gradients with respect to x, the norm's weight, gate, up and down.

        ``wants`` selects among the last three; gate and up are computed together.
        """
        x_grad, norm_grad = torch.empty_like(x), _like(part.norm)
        gate_grad, up_grad = (torch.empty_like(part.gate) if wants[0] or wants[1] else None for _ in range(2))
        down_grad = torch.empty_like(part.down) if wants[2] else None
        gradients = x_grad, norm_grad, gate_grad, up_grad, down_grad
        self._feed_forward_backward(_feed_forward_struct(part, x), *gradients, grad, x, saved)
        return gradients

    def project_heads(self, x: Tensor, part: Heads, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q (N, heads, D), k and v (N, kv_heads, D) for x (N, H) and, if ``keep``, what the backward needs."""
        q, k, v = (
            x.new_empty(len(x), len(projection.weight) // part.head_dim, part.head_dim)
            for projection in part.projections
        )
        has_norms = part.head_norms is not None
        saved = x.new_empty(len(x), q.shape[1] + k.shape[1], part.head_dim) if keep and has_norms else None
        self._heads(_heads_struct(part, x), q, k, v, saved, x)
        return q, k, v, saved

    def project_heads_backward(
        self,
        grads: Sequence[Tensor],
        other: Tensor | None,
        x: Tensor,
        saved: Tensor | None,
        part: Heads,
        wants_weights: bool,
    ) -> tuple[Tensor, list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Gradients with respect to x, the three weights, the three biases, and the weights of the norms of x, q and k.

        ``grads`` are those with respect to q, k and v; ``other``, (N, H), is added to the gradient of x.
        """
        x_grad = torch.empty_like(x)
        norm_grads = [_like(norm) for norm in (part.norm, *(part.head_norms or (None, None)))]
        weight_grads = [
            torch.empty_like(projection.weight) if wants_weights else None for projection in part.projections
        ]
        bias_grads = [
            None if projection.bias is None else torch.empty_like(projection.bias) for projection in part.projections
        ]
        arrays = [(_POINTER * 3)(*map(address, tensors)) for tensors in (weight_grads, bias_grads)]
        self._heads_backward(_heads_struct(part, x), x_grad, *norm_grads, *arrays, *grads, other, x, saved)
        return x_grad, weight_grads, bias_grads, norm_grads

    def project(self, x: Tensor, part: Linear, other: Tensor | None = None) -> Tensor:
        """Compute x Wᵀ + b + other, (N, outputs), for x (N, inputs)."""
        y = x.new_empty(len(x), len(part.weight))
        self._project(_projection_struct(part, x), y, x, other)
        return y

    def project_backward(
        self, grad: Tensor, x: Tensor, part: Linear, wants: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients with respect to x, W and b, each only if it is set in ``wants``."""
        like = x, part.weight, part.bias
        gradients = [
            torch.empty_like(tensor) if is_needed and tensor is not None else None
            for tensor, is_needed in zip(like, wants, strict=True)
        ]
        self._project_backward(_projection_struct(part, x), *gradients, grad, x)
        return gradients[0], gradients[1], gradients[2]

    def rms_norm_backward(self, grad: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Gradients with respect to x (..., H) and the norm's weight."""
        x_grad, weight_grad = torch.empty_like(x), torch.empty_like(norm.weight)
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        tensors = map(address, (x_grad, weight_grad, grad, x))
        if self._norm_backward(_norm_struct(norm), *tensors, rows, width, _threads(rows)):
            raise MemoryError(f"no memory for the norm of {rows} tokens; use fewer tokens in a pass")
        return x_grad, weight_grad


def _threads(rows: int) -> int:
    return max(1, min(torch.get_num_threads(), rows // _FEW_ROWS))


def _like(norm: Norm | None) -> Tensor | None:
    return None if norm is None else torch.empty_like(norm.weight)


def _with_pointers(function: Any, struct: object, count: int) -> Callable[..., None]:
    """Wrap a C function that takes a struct, ``count`` tensors or arrays of addresses, and a number of threads."""
    function.argtypes = [struct, *[_POINTER] * count, _INT]

    def call(of: Any, *tensors: object) -> None:
        pointers = [address(t) if t is None or isinstance(t, Tensor) else t for t in tensors]
        if function(of, *pointers, _threads(of.rows)):
            raise MemoryError(f"no memory for a layer over {of.rows} tokens; use fewer tokens in a pass")

    return call
