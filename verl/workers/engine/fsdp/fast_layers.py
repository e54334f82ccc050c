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
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.utils.cpu_kernels import FeedForward, Heads, Linear, Norm
from verl.workers.engine.fsdp.kernels import attention_inputs, feed_forward, linear, rms_norm

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2")
"""Prefixes of the classes that Transformers names ``...Attention``, ``...MLP``, ``...RMSNorm``, ``...DecoderLayer``."""

_ENDS = ("Attention", "MLP", "RMSNorm", "DecoderLayer")
_TRANSFORMERS = "transformers.models."

_ONE_PLUS = ("Gemma", "Gemma2")
"""Families whose norms multiply by 1 + w."""

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
"""Of feed-forward layers, by their names in Transformers configs."""

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""Of a decoder layer x ↦ y + mlp(norm(y)), y = x + attention(norm(x))."""


class _FastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _FastRMSNorm(nn.Module):
    _one_plus = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, _norm_of(self))


class _FastOnePlusRMSNorm(_FastRMSNorm):
    _one_plus = True


class _FastMLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(x, _feed_forward_of(self))


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
        if past_key_values is not None:  # the cache's own rules
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        attended, weights, _ = _attend(own, hidden_states, position_embeddings, attention_mask, None, **kwargs)
        return own.o_proj(attended), weights


class _FastDecoderLayer(nn.Module):
    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> Tensor:
        own: Any = self
        parts = own.self_attn, own.mlp, own.input_layernorm, own.post_attention_layernorm
        if past_key_values is not None or any(_is_watched(part) for part in parts):
            return super().forward(hidden_states, past_key_values=past_key_values, **kwargs)
        attention, mlp, *norms = parts
        before, after = map(_norm_of, norms)
        attended, _, x = _attend(attention, hidden_states, norm=before, **kwargs)
        y = linear(attended, attention.o_proj.weight, attention.o_proj.bias, x)
        return feed_forward(y, _feed_forward_of(mlp)._replace(norm=after, adds=True))


def _attend(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    norm: Norm | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What the heads of an attention layer find, before its last projection; its weights; and ``hidden_states``."""
    shape = hidden_states.shape[:-1]
    projections: Any = tuple(Linear(part.weight, part.bias) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    head_norms = (_norm_of(layer.q_norm), _norm_of(layer.k_norm)) if hasattr(layer, "q_norm") else None
    cos, sin = _rotation(*position_embeddings, shape)
    part = Heads(projections, layer.head_dim, cos, sin, norm, head_norms)
    *found, same = attention_inputs(hidden_states.reshape(-1, hidden_states.shape[-1]), part)
    heads = [x.view(*shape, -1, layer.head_dim).transpose(1, 2) for x in found]
    eager = sys.modules[type(layer).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, eager)
    output, weights = attend(
        layer,
        *heads,
        attention_mask,
        dropout=layer.attention_dropout if layer.training else 0.0,
        scaling=layer.scaling,
        sliding_window=_window(layer),
        softcap=getattr(layer, "attn_logit_softcapping", None),
        **kwargs,
    )
    return output.reshape(*shape, -1), weights, same.view(hidden_states.shape)


def _norm_of(layer: Any) -> Norm:
    """Of one of our fast norms."""
    if layer._one_plus:
        return Norm(layer.weight, layer.eps, 1.0)
    return Norm(layer.weight, layer.variance_epsilon)


def _feed_forward_of(layer: Any) -> FeedForward:
    weights = layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight
    return FeedForward(*weights, activation=_ACTIVATIONS[_activation(layer.config)])


def _window(layer: Any) -> int | None:
    """Mistral's layers have it in their config only."""
    if hasattr(layer, "sliding_window"):
        return layer.sliding_window
    return getattr(layer.config, "sliding_window", None) if type(layer).__name__ == "MistralAttention" else None


def _rotation(cos: Tensor, sin: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """(N, D/2) each, in fp32 or wider, of what Transformers makes with both halves of D alike.

    Made once for all layers, which share ``cos``; it lives as long as that tensor. Where all sequences of a batch have
    the same positions, ``cos`` has one row for all of them.
    """
    made = getattr(cos, "_verl_rotation", None)
    if made is None:
        half, wide = cos.shape[-1] // 2, torch.promote_types(cos.dtype, torch.float32)
        made = [x[..., :half].expand(*shape, -1).reshape(-1, half).to(wide).contiguous() for x in (cos, sin)]
        cos._verl_rotation = made  # pyright: ignore[reportAttributeAccessIssue]
    return made[0], made[1]


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
    if isinstance(module, FSDPModule):  # a class made for its unit, of the same name after "FSDP"
        kind = kind.__mro__[2]
    family, part = next(
        ((kind.__name__.removesuffix(end), end) for end in _ENDS if kind.__name__.endswith(end)), ("", "")
    )
    if family not in FAMILIES or not kind.__module__.startswith(_TRANSFORMERS):
        return None
    own: Any = module
    if part == "DecoderLayer":
        children = dict(own.named_children())
        is_known = children.keys() == _PARTS and all(
            _fast_class(child) and not _is_watched(child) for child in children.values()
        )
        return _FastDecoderLayer if is_known else None
    if isinstance(module, FSDPModule):
        return None
    if part == "RMSNorm":
        return _FastOnePlusRMSNorm if family in _ONE_PLUS else _FastRMSNorm
    if not all(_is_own(child) for child in module.children()):
        return None
    if part == "Attention":
        return _FastAttention
    return _FastMLP if _activation(own.config) in _ACTIVATIONS and own.gate_proj.bias is None else None


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody waits for it to be called: a hook, or FSDP, which gathers a unit's weights then."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or isinstance(module, FSDPModule)


def _is_own(child: nn.Module) -> bool:
    """Whether the layer above may read this one's weight itself: it is no adapter, no unit of FSDP, and has no hook."""
    if isinstance(child, nn.Linear):
        return type(child) is nn.Linear and not _is_watched(child)
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
