"""Faster ``forward`` methods for layers of Transformers models on NVIDIA GPUs, by Liger's Triton kernels.

A norm of Transformers is eight kernels that each read and write all states, and a pass over few tokens takes the time
of launching them. Liger's is one kernel, forward and backward; so are its rotation of queries and keys and the product
of an MLP's gate. Rounding is that of Transformers for norms and gates; rotations are rounded once instead of thrice.

:func:`use_fused_layers` replaces ``forward`` alone. Layers are recognised by class names and parts, so callers must
compare the whole model with its own forward pass.
"""

from __future__ import annotations

import importlib.util
import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl.backends.replaced_layers import MLP_PARTS, activation_of, norm_epsilon, norm_rule, replace_forwards
from verl.errors import ConfigError

ROTATION = "apply_rotary_pos_emb"
"""Function by which attention in code of Transformers rotates queries and keys."""


def fuses_layers(use_liger: bool | None) -> bool:
    """Return whether models on a GPU of this machine use Liger's kernels; see ``model.use_liger``.

    Raises:
        ConfigError: ``use_liger`` is true, and the package is not installed.
    """
    is_installed = importlib.util.find_spec("liger_kernel") is not None
    if use_liger and not is_installed:
        raise ConfigError(
            "use_liger=true: the package liger-kernel is not installed on this machine. Run "
            "`pip install liger-kernel`, or set use_liger=null, which uses it where it is installed."
        )
    return is_installed and use_liger is not False


def use_fused_layers(model: nn.Module) -> Callable[[], None]:
    """Replace ``forward`` of every supported layer of ``model``; the returned function undoes it."""
    return replace_forwards(model, _fused_class)


# ---- the layers


class _FusedRMSNorm(nn.Module):
    _offset, _casting = 0.0, "llama"

    def forward(self, hidden_states: Tensor) -> Tensor:
        norm: Any = self
        if not _is_taken(hidden_states) or hidden_states.dtype != norm.weight.dtype:
            return super().forward(hidden_states)
        return _liger().LigerRMSNormFunction.apply(
            hidden_states,
            norm.weight,
            norm_epsilon(norm),
            self._offset,
            self._casting,
            False,  # not in place
        )


class _FusedOnePlusRMSNorm(_FusedRMSNorm):
    _offset, _casting = 1.0, "gemma"


class _FusedMLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not _is_taken(x):
            return super().forward(x)
        mlp: Any = self
        return mlp.down_proj(_liger().LigerSiLUMulFunction.apply(mlp.gate_proj(x), mlp.up_proj(x)))


def fused_rotation(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make a function that computes what ``rotate`` does, by one kernel for queries and keys on a GPU.

    Args:
        rotate: (query, key, cos, sin), (B, heads, tokens, head_dim) and (B or 1, tokens, head_dim), to the first two.
    """

    def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *settings: Any, **named: Any) -> Any:
        if not _is_taken(query) or settings or named or cos.shape[-1] != query.shape[-1]:
            return rotate(query, key, cos, sin, *settings, **named)
        return _liger().LigerRopeFunction.apply(query, key, cos, sin)

    return rotated


@cache
def _fused_attention(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return a class with the ``forward`` of an attention layer, in which one kernel rotates; None if it differs."""
    forward = inspect.unwrap(kind.forward)
    rotate = forward.__globals__.get(ROTATION)
    if rotate is None or ROTATION not in forward.__code__.co_names or not _rotates_halves(rotate):
        return None
    names = forward.__globals__ | {ROTATION: fused_rotation(rotate)}
    copied = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Fused{kind.__name__}", (nn.Module,), {"forward": copied})


def _rotates_halves(rotate: Callable[..., Any]) -> bool:
    """Check by random numbers whether ``rotate`` maps x to x · cos + (-x₂, x₁) · sin, for the halves x₁, x₂ of x."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.rand(1, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = (torch.rand(1, 3, 4, generator=generator).repeat(1, 1, 2) for _ in range(2))
    try:
        results = rotate(query, key, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # it takes other arguments, as rotations of images do
        return False
    expected = [x * cos[:, None] + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin[:, None] for x in (query, key)]
    return all(
        torch.allclose(result, reference, atol=1e-6) for result, reference in zip(results, expected, strict=True)
    )


def _liger() -> Any:
    """Return Liger's operations; to import them takes a GPU's Triton."""
    from liger_kernel import ops

    return ops


def _is_taken(x: Tensor) -> bool:
    return x.is_cuda and type(x) is Tensor and x.numel() > 0


def _fused_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class whose ``forward`` can replace that of ``module``, if there is one."""
    kind = type(module)
    if isinstance(module, FSDPModule) or not kind.__module__.startswith("transformers.models."):
        return None
    if kind.__name__.endswith("RMSNorm"):
        rule = norm_rule(module)
        return rule and (_FusedOnePlusRMSNorm if rule[1] else _FusedRMSNorm)
    if kind.__name__.endswith("MLP") and dict(module.named_children()).keys() == MLP_PARTS:
        return _FusedMLP if activation_of(module.get_submodule("act_fn")) == "silu" else None
    return _fused_attention(kind) if kind.__name__.endswith("Attention") else None
