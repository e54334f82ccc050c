"""Faster ways to compute what layers of Transformers models compute: without gradients, on a CPU.

A layer gets another ``forward`` where it has a form that is known here; :mod:`verl.workers.rollout.native.trial` then
compares the whole model with its own forward. In fp32 linear layers take oneDNN's product where PyTorch has it, and our
kernels do norms and gated MLPs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from verl.utils.cpu_kernels import CPUKernels, Norm

_HAS_ONEDNN = torch.backends.mkldnn.is_available()  # not in every build, such as those for Apple's processors


def use_fast_forward(layer: Any, kernels: CPUKernels | None) -> None:
    """Give a layer a faster ``forward``, if there is one for it.

    Args:
        layer: part of a model in eval mode, on a CPU.
        kernels: of this machine, for a model in fp32; None has none.
    """
    forward = _forward_with(kernels, layer)
    if forward is not None:
        layer.forward = forward


def _forward_with(kernels: CPUKernels | None, layer: Any) -> Callable[..., Any] | None:
    kind = type(layer).__name__
    if isinstance(layer, nn.Linear):
        return functools.partial(_linear, layer._parameters)
    if kernels is None:
        return None
    if kind.endswith("RMSNorm") and (rule := norm_rule(layer)) is not None:
        return functools.partial(_rms_norm, layer._parameters, kernels, rule)
    if kind.endswith("MLP") and _is_gated(layer):
        projections = (layer.gate_proj._parameters, layer.up_proj._parameters, layer.down_proj._parameters)
        return functools.partial(_gated_mlp, *projections, kernels)
    return None


def _linear(parameters: Any, x: Tensor) -> Tensor:
    """In fp32 by oneDNN: it beats the BLAS behind ``functional.linear`` on the few rows of a decoding step."""
    weight, bias = parameters["weight"], parameters["bias"]
    if _HAS_ONEDNN and x.dtype is torch.float32:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


# ---- norms and MLPs


def norm_rule(layer: Any) -> tuple[float, float] | None:
    """Epsilon of an RMS norm, and 0 or 1 if its factor is the weight or one more; None if it is something else."""
    eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
    weight = getattr(layer, "weight", None)
    if not isinstance(eps, float) or weight is None or weight.dim() != 1 or len(list(layer.parameters())) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.rand(size, generator=generator) + 0.5 for size in ((3, len(weight)), (len(weight),)))
    found = torch.func.functional_call(layer, {"weight": w}, (x,))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if torch.allclose(found, (offset + w) * normed, rtol=1e-5, atol=1e-6):
            return eps, offset
    return None


def _rms_norm(parameters: Any, kernels: CPUKernels, rule: tuple[float, float], x: Tensor) -> Tensor:
    return kernels.rms_norm(x.contiguous(), Norm(parameters["weight"], *rule))


def _is_gated(layer: Any) -> bool:
    activation = type(getattr(layer, "act_fn", None)).__name__
    parts = (getattr(layer, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    return activation in {"SiLU", "SiLUActivation"} and all(isinstance(part, nn.Linear) for part in parts)


def _gated_mlp(gate: Any, up: Any, down: Any, kernels: CPUKernels, x: Tensor) -> Tensor:
    return _linear(down, kernels.silu_mul(_linear(gate, x), _linear(up, x)))
