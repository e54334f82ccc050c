"""Layers of known Transformers families, computed by :mod:`verl.workers.engine.fsdp.kernels` on a CPU.

Only ``forward`` changes: a layer stays where it is, with its parameters, their names and its hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.workers.engine.fsdp.kernels import ACTIVATIONS, Rotation, attention_inputs, gated_mlp, linear, rms_norm

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2")
"""Prefixes of the classes that Transformers names ``...Attention``, ``...MLP`` and ``...RMSNorm``."""

_ONE_PLUS = ("Gemma", "Gemma2")
"""Families whose norms multiply by 1 + w."""


class _FastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _FastRMSNorm(nn.Module):
    _one_plus = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        own: Any = self
        eps = own.eps if self._one_plus else own.variance_epsilon
        return rms_norm(hidden_states, own.weight, eps, self._one_plus)


class _FastOnePlusRMSNorm(_FastRMSNorm):
    _one_plus = True


class _FastMLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        return gated_mlp(x, own.gate_proj.weight, own.up_proj.weight, own.down_proj.weight, _activation(own.config))


class _FastAttention(nn.Module):
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        own: Any = self
        if past_key_values is not None:  # what a cache keeps must be in Transformers' order
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        shape = hidden_states.shape[:-1]
        projections = own.q_proj, own.k_proj, own.v_proj
        norms = (own.q_norm, own.k_norm) if hasattr(own, "q_norm") else None
        found = attention_inputs(
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            [layer.weight for layer in projections],
            [layer.bias for layer in projections],
            None if norms is None else [norm.weight for norm in norms],
            0.0 if norms is None else norms[0].variance_epsilon,
            _rotation(*position_embeddings, shape),
            own.head_dim,
        )
        heads = [x.view(*shape, -1, own.head_dim).transpose(1, 2) for x in found]
        eager = sys.modules[type(self).__module__].eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(own.config._attn_implementation, eager)
        output, weights = attend(
            self,
            *heads,
            attention_mask,
            dropout=own.attention_dropout if self.training else 0.0,
            scaling=own.scaling,
            sliding_window=_window(own),
            softcap=getattr(own, "attn_logit_softcapping", None),
            **kwargs,
        )
        return own.o_proj(output.reshape(*shape, -1)), weights


def _window(layer: Any) -> int | None:
    """Mistral's layers have it in their config only."""
    if hasattr(layer, "sliding_window"):
        return layer.sliding_window
    return getattr(layer.config, "sliding_window", None) if type(layer).__name__ == "MistralAttention" else None


def _rotation(cos: Tensor, sin: Tensor, shape: torch.Size) -> Rotation:
    """Made once for all layers, which share ``cos``; it lives as long as that tensor.

    Where all sequences of a batch have the same positions, ``cos`` has one row for all of them.
    """
    made = getattr(cos, "_verl_rotation", None)
    if made is None:
        made = Rotation(*(x.expand(*shape, -1) for x in (cos, sin)))
        cos._verl_rotation = made  # pyright: ignore[reportAttributeAccessIssue]
    return made


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


@cache
def _with_forward_of(kind: type[nn.Module], fast: type[nn.Module]) -> type[nn.Module]:
    """``kind`` under its own name, with the forward pass of ``fast``."""
    return type(kind.__name__, (fast, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _fast_class(module: nn.Module) -> type[nn.Module] | None:
    """What computes this very module, if something here does."""
    kind = type(module)
    if kind is nn.Linear:
        return _FastLinear
    name = kind.__name__.removesuffix("Attention").removesuffix("MLP").removesuffix("RMSNorm")
    if name not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        return None
    if kind.__name__.endswith("RMSNorm"):
        return _FastOnePlusRMSNorm if name in _ONE_PLUS else _FastRMSNorm
    if not all(_is_own(child) for child in module.children()):
        return None
    own: Any = module
    if kind.__name__.endswith("Attention"):
        return _FastAttention
    return _FastMLP if _activation(own.config) in ACTIVATIONS and own.gate_proj.bias is None else None


def _is_own(child: nn.Module) -> bool:
    """Whether the layer above may read this one's weight itself: it is no adapter, no unit of FSDP, and has no hook."""
    if isinstance(child, nn.Linear):
        return type(child) is nn.Linear and not (child._forward_hooks or child._forward_pre_hooks)
    return not any(True for _ in child.children())


def use_fast_layers(model: nn.Module) -> Callable[[], None]:
    """Give every known layer of ``model`` its fast forward pass; what is returned takes them away again."""
    found = [(module, type(module), fast) for module in model.modules() if (fast := _fast_class(module)) is not None]
    for module, kind, fast in found:
        module.__class__ = _with_forward_of(kind, fast)

    def undo() -> None:
        for module, kind, _ in found:
            module.__class__ = kind

    return undo
