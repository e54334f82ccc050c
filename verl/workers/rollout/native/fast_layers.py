"""Faster ways to compute what layers of Transformers models compute: without gradients, on a CPU.

A layer gets another ``forward`` where it has a form that is known here; :mod:`verl.workers.rollout.native.trial` then
compares the whole model with its own forward. In fp32 linear layers take oneDNN's product where PyTorch has it, our
kernels do norms and gated MLPs, and where a layer decodes, everything between the projections of its attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from verl.utils.cpu_kernels import CPUKernels, Norm
from verl.workers.rollout.native.memory import AttentionRule, HeadRule, SharedPromptMemory
from verl.workers.rollout.native.passes import DecodePass

_HAS_ONEDNN = torch.backends.mkldnn.is_available()  # not in every build, such as those for Apple's processors
_LLAMA_LIKE = {"Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"}
"""Families whose layers are norm, attention, norm, gated MLP, with residuals; some norm the heads too."""


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
    if kind.endswith("RMSNorm") and (rule := _norm_rule(layer)) is not None:
        return functools.partial(_rms_norm, layer._parameters, kernels, rule)
    if kind.endswith("MLP") and _is_gated(layer):
        projections = (layer.gate_proj._parameters, layer.up_proj._parameters, layer.down_proj._parameters)
        return functools.partial(_gated_mlp, *projections, kernels)
    if kind in {f"{family}Attention" for family in _LLAMA_LIKE} and _is_plain(layer):
        return _DecodingAttention(layer)
    if kind in {f"{family}DecoderLayer" for family in _LLAMA_LIKE}:
        rule = _norm_rule(layer.post_attention_layernorm)
        return None if rule is None else _DecodingLayer(layer, kernels, rule)
    return None


def _linear(parameters: Any, x: Tensor) -> Tensor:
    """In fp32 by oneDNN: it beats the BLAS behind ``functional.linear`` on the few rows of a decoding step."""
    weight, bias = parameters["weight"], parameters["bias"]
    if _HAS_ONEDNN and x.dtype is torch.float32:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


# ---- norms and MLPs


def _norm_rule(layer: Any) -> tuple[float, float] | None:
    """Its epsilon, and 0 or 1 if the factor is the weight or one more than it; None if it is something else."""
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


def _is_plain(layer: Any) -> bool:
    """The projections are linear layers, and norms of the heads, if any, are RMS norms."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    norms = (norm for name in ("q_norm", "k_norm") if (norm := getattr(layer, name, None)) is not None)
    return all(isinstance(part, nn.Linear) for part in projections) and all(_norm_rule(norm) for norm in norms)


def _is_gated(layer: Any) -> bool:
    activation = type(getattr(layer, "act_fn", None)).__name__
    parts = (getattr(layer, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    return activation in {"SiLU", "SiLUActivation"} and all(isinstance(part, nn.Linear) for part in parts)


def _gated_mlp(gate: Any, up: Any, down: Any, kernels: CPUKernels, x: Tensor) -> Tensor:
    return _linear(down, kernels.silu_mul(_linear(gate, x), _linear(up, x)))


# ---- decoding


class _DecodingAttention:
    """Norms of the heads, rotation, memory and attention in one kernel; prompts go the layer's own way."""

    def __init__(self, layer: Any) -> None:
        self._own = layer.forward
        self._number, self._head_dim = layer.layer_idx, layer.head_dim
        self._rule = AttentionRule(layer.scaling, _window(layer))
        self._into = [part._parameters for part in (layer.q_proj, layer.k_proj, layer.v_proj)]
        self._out = layer.o_proj._parameters
        norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(layer, name, None)) is not None]
        self._norms = [(norm._parameters, rule) for norm in norms if (rule := _norm_rule(norm)) is not None]

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        native_pass: Any = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        if position_embeddings is None or not self._decodes(native_pass):
            arguments = hidden_states, position_embeddings, attention_mask, past_key_values
            return self._own(*arguments, native_pass=native_pass, **settings)
        rows = hidden_states.shape[1]
        query, key, value = (_linear(part, hidden_states).view(rows, -1, self._head_dim) for part in self._into)
        cos, sin = position_embeddings  # (1, rows, head_dim)
        heads = HeadRule(self._head_norms(), (cos[0], sin[0]))
        attended = native_pass.memory.decode(self._number, query, key, value, self._rule, heads)
        return _linear(self._out, attended.view(1, rows, -1)), None

    def _head_norms(self) -> tuple[Norm, Norm] | None:
        if not self._norms:
            return None
        query, key = (Norm(parameters["weight"], *rule) for parameters, rule in self._norms)
        return query, key

    @staticmethod
    def _decodes(native_pass: Any) -> bool:
        return isinstance(native_pass, DecodePass) and isinstance(native_pass.memory, SharedPromptMemory)


def _window(layer: Any) -> int | None:
    """As the layer itself hands it to attention: Mistral's is the model's, Llama's and Gemma's code has none."""
    owner = layer.config if type(layer).__name__ == "MistralAttention" else layer
    return getattr(owner, "sliding_window", None)


class _DecodingLayer:
    """The residual is added on the way to the second norm, in place; prompts go the layer's own way."""

    def __init__(self, layer: Any, kernels: CPUKernels, norm_rule: tuple[float, float]) -> None:
        self._own, self._kernels, self._norm_rule = layer.forward, kernels, norm_rule
        self._attention, self._mlp = layer.self_attn, layer.mlp
        self._first_norm, self._second_norm = layer.input_layernorm, layer.post_attention_layernorm._parameters

    def __call__(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        if not isinstance(arguments.get("native_pass"), DecodePass):
            return self._own(hidden_states, **arguments)
        attended, _ = self._attention.forward(hidden_states=self._first_norm.forward(hidden_states), **arguments)
        norm = Norm(self._second_norm["weight"], *self._norm_rule)
        return hidden_states.add_(self._mlp.forward(self._kernels.rms_norm(hidden_states, norm, added=attended)))
