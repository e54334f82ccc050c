"""Faster ``forward`` methods for layers of Transformers models, in fp32 on a CPU.

:func:`use_fast_layers` replaces ``forward`` alone: modules, parameters, names and hooks stay. It recognises layers by
class names and parts, so callers must compare the whole model with its own forward pass.

training    linear layers, norms and gated MLPs of any model; attention and whole decoder layers of ``FAMILIES``
inference   linear layers, norms and gated MLPs, without gradients, also for few rows

Without a C compiler only linear layers for inference are replaced, by oneDNN's. In formats other than fp32 compiled
layers were no faster than those of Transformers (``python -m benchmarks.compiled_parts``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl.backends.cpu.kernels import FeedForward, Heads, Linear, Norm, cpu_kernels
from verl.backends.cpu.layer_functions import attention_inputs, feed_forward, inference_linear, linear, rms_norm
from verl.backends.replaced_layers import MLP_PARTS, activation_of, norm_epsilon, norm_rule, replace_forwards
from verl.utils.transformers_private import ALL_ATTENTION_FUNCTIONS, attention_of

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2")
"""Prefixes of the ``...Attention`` and ``...DecoderLayer`` classes of Transformers that are replaced in training."""

# Parts of a decoder layer x ↦ y + mlp(norm(y)), y = x + attention(norm(x)).
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def use_fast_layers(model: nn.Module, for_training: bool) -> Callable[[], None]:
    """Replace ``forward`` of every supported layer of ``model``; the returned function undoes it."""
    return replace_forwards(model, partial(_fast_class, for_training=for_training))


# ---- the layers


class _FastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not _is_taken(input):
            return super().forward(input)
        return linear(input, self.weight, self.bias)


class _InferenceLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return inference_linear(input, self.weight, self.bias)


class _FastRMSNorm(nn.Module):
    _offset = 0.0

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _is_taken(hidden_states):
            return super().forward(hidden_states)
        return rms_norm(hidden_states, _norm_of(self))


class _FastOnePlusRMSNorm(_FastRMSNorm):
    _offset = 1.0


class _FastMLP(nn.Module):
    _activation = "silu"

    def forward(self, x: Tensor) -> Tensor:
        if not _is_taken(x):
            return super().forward(x)
        return feed_forward(x, _feed_forward_of(self))


class _FastGeluMLP(_FastMLP):
    _activation = "gelu"


class _InferenceMLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        kernels = cpu_kernels()
        if kernels is None or not _is_taken(x):
            return super().forward(x)
        return module.down_proj(kernels.silu_mul(module.gate_proj(x), module.up_proj(x)))


class _FastAttention(nn.Module):
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self
        if past_key_values is not None or not _is_taken(hidden_states):  # a cache may store and return other keys
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        attended, weights, _ = _attend(module, hidden_states, position_embeddings, attention_mask, None, **kwargs)
        return module.o_proj(attended), weights


class _FastDecoderLayer(nn.Module):
    def forward(self, hidden_states: Tensor, past_key_values: object = None, **kwargs: Any) -> Tensor:
        module: Any = self
        parts = module.self_attn, module.mlp, module.input_layernorm, module.post_attention_layernorm
        is_alone = past_key_values is None and not any(_is_watched(part) for part in parts)
        if not is_alone or not _is_taken(hidden_states):
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
    **kwargs: object,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the output of the heads before the last projection, the attention weights, and ``hidden_states``."""
    shape = hidden_states.shape[:-1]
    projections: Any = tuple(Linear(part.weight, part.bias) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    head_norms = (_norm_of(layer.q_norm), _norm_of(layer.k_norm)) if hasattr(layer, "q_norm") else None
    cos, sin = _rotation(*position_embeddings, shape)
    part = Heads(projections, layer.head_dim, cos, sin, norm, head_norms)
    *states, same = attention_inputs(hidden_states.reshape(-1, hidden_states.shape[-1]), part)
    heads = [x.view(*shape, -1, layer.head_dim).transpose(1, 2) for x in states]
    eager = sys.modules[type(layer).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention_of(layer.config) or "eager", eager)
    output, weights = attend(
        layer,
        *heads,
        attention_mask,
        dropout=layer.attention_dropout if layer.training else 0.0,
        scaling=layer.scaling,
        sliding_window=attention_window(layer),
        softcap=getattr(layer, "attn_logit_softcapping", None),
        **kwargs,
    )
    return output.reshape(*shape, -1), weights, same.view(hidden_states.shape)


def _is_taken(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.numel() > 0


def _norm_of(layer: Any) -> Norm:
    return Norm(layer.weight, norm_epsilon(layer), layer._offset)


def _feed_forward_of(layer: Any) -> FeedForward:
    weights = layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight
    return FeedForward(*weights, activation=layer._activation)


def _rotation(cos: Tensor, sin: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Convert (..., D) cosines and sines, whose halves are equal, to (N, D/2) in fp32."""
    # Kept on the tensor that all layers share, so it is made once per pass and freed with that tensor.
    rotation = getattr(cos, "_verl_rotation", None)
    if rotation is None:
        half = cos.shape[-1] // 2
        # ``cos`` has a single row where all sequences of a batch have the same positions.
        rotation = [x[..., :half].expand(*shape, -1).reshape(-1, half).float().contiguous() for x in (cos, sin)]
        cos._verl_rotation = rotation  # pyright: ignore[reportAttributeAccessIssue]
    return rotation[0], rotation[1]


# ---- what a layer is


def _fast_class(module: nn.Module, for_training: bool) -> type[nn.Module] | None:
    """Return the class whose ``forward`` can replace that of ``module``, if there is one."""
    kind = type(module)
    if kind is nn.Linear and not for_training:
        return _InferenceLinear
    if cpu_kernels() is None:
        return None
    if kind is nn.Linear:
        return _FastLinear
    is_unit = isinstance(module, FSDPModule)
    if is_unit:  # FSDP derives a class "FSDP<name>" for each unit; the original follows it and FSDPModule in the MRO
        kind = kind.__mro__[2]
    if kind.__name__.endswith("DecoderLayer"):
        return _FastDecoderLayer if for_training and _is_known_layer(module, kind) else None
    if is_unit:
        return None
    if kind.__name__.endswith("RMSNorm"):
        rule = norm_rule(module)
        return rule and (_FastOnePlusRMSNorm if rule[1] else _FastRMSNorm)
    if not all(_is_own(child) for child in module.children()):
        return None
    if kind.__name__.endswith("Attention"):
        return _FastAttention if for_training and _family(kind, "Attention") else None
    if kind.__name__.endswith("MLP") and dict(module.named_children()).keys() == MLP_PARTS:
        return _fast_mlp(module, for_training)
    return None


def _family(kind: type[nn.Module], ending: str) -> str | None:
    name = kind.__name__.removesuffix(ending)
    return name if name in FAMILIES and kind.__module__.startswith("transformers.models.") else None


def _is_known_layer(module: nn.Module, kind: type[nn.Module]) -> bool:
    parts = dict(module.named_children())
    if not _family(kind, "DecoderLayer") or parts.keys() != _LAYER_PARTS:
        return False
    return all(_fast_class(part, for_training=True) and not _is_watched(part) for part in parts.values())


def _fast_mlp(layer: Any, for_training: bool) -> type[nn.Module] | None:
    activation = activation_of(layer.act_fn)
    if not for_training:
        return _InferenceMLP if activation == "silu" else None
    if activation is None or any(part.bias is not None for part in (layer.gate_proj, layer.up_proj, layer.down_proj)):
        return None
    return _FastMLP if activation == "silu" else _FastGeluMLP


def _is_watched(module: nn.Module) -> bool:
    """Return whether calling ``module`` has side effects: a hook, or an FSDP unit, whose weights are gathered then."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or isinstance(module, FSDPModule)


def _is_own(child: nn.Module) -> bool:
    """Return whether the layer above may read this one's weight directly: no adapter, no FSDP unit, no hook."""
    if isinstance(child, nn.Linear):
        return type(child) is nn.Linear and not _is_watched(child)
    return not any(True for _ in child.children())


def attention_window(layer: Any) -> int | None:
    """Return the sliding window that the layer's own code passes to attention."""
    # Mistral's code reads it from the config; Llama's and Gemma's passes none, whatever their config says.
    owner = layer.config if type(layer).__name__ == "MistralAttention" else layer
    return getattr(owner, "sliding_window", None)
