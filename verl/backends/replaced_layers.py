"""Replacement of layers of Transformers models by faster ones, and the exchange of their ``forward``.

Modules, parameters, names and hooks stay. Layers are recognised by class names, parts and what they compute for a few
numbers, so callers compare the whole model with its own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""Children of a layer x ↦ down_proj(act_fn(gate_proj(x)) · up_proj(x))."""
_ACTIVATIONS = {"silu": functional.silu, "gelu": partial(functional.gelu, approximate="tanh")}


def replace_forwards(
    model: nn.Module, replacement: Callable[[nn.Module], type[nn.Module] | None]
) -> Callable[[], None]:
    """Set the ``forward`` of each module of ``model`` to that of the class that ``replacement`` returns for it, if any.

    Returns:
        a function that undoes it.
    """
    replaced = [(m, type(m), fast) for m in model.modules() if (fast := replacement(m)) is not None]
    for module, kind, fast in replaced:
        module.__class__ = _with_forward_of(kind, fast)

    def undo() -> None:
        for module, kind, _ in replaced:
            module.__class__ = kind

    return undo


@cache
def _with_forward_of(kind: type[nn.Module], fast: type[nn.Module]) -> type[nn.Module]:
    """Derive a class from ``kind``, of the same name, with the forward pass of ``fast``."""
    return type(kind.__name__, (fast, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def norm_rule(layer: Any) -> tuple[float, float] | None:
    """Determine (ε, offset) of a layer that computes x / √(mean x² + ε) · (weight + offset), by trying random numbers.

    The offset is 0, or 1 as in Gemma. None if the layer is no such norm.
    """
    eps, weight = norm_epsilon(layer), getattr(layer, "weight", None)
    if not isinstance(eps, float) or weight is None or weight.dim() != 1 or len(list(layer.parameters())) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.rand(size, generator=generator) + 0.5 for size in ((3, len(weight)), (len(weight),)))
    output = torch.func.functional_call(layer, {"weight": w}, (x,))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if torch.allclose(output, (offset + w) * normed, rtol=1e-5, atol=1e-6):
            return eps, offset
    return None


def norm_epsilon(layer: object) -> Any:
    """Return ε of a norm, whatever its code calls it; None if it has none."""
    return getattr(layer, "variance_epsilon", getattr(layer, "eps", None))


def activation_of(function: nn.Module) -> str | None:
    """Return the name of an activation, ``silu`` or ``gelu`` (by tanh), by comparing values; None for another."""
    x = torch.linspace(-4, 4, 65)
    output = function(x)
    return next(
        (name for name, candidate in _ACTIVATIONS.items() if torch.allclose(candidate(x), output, atol=1e-6)), None
    )
