"""A decoding step in one call of our C code, for decoders whose layers it knows, in fp32 on a CPU.

The model's embeddings are looked up by the model itself; from there to the logits it is
:class:`verl.utils.cpu_kernels.DecoderPass`, on the trainer's own weights where they lie. Prompts go through the
model's own code. :mod:`verl.workers.rollout.native.trial` compares both with the model's own forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from verl.utils.cpu_kernels import CPUKernels, Decoder, DecoderLayer, DecoderPass, Linear
from verl.workers.rollout.native.fast_layers import norm_rule
from verl.workers.rollout.native.memory import SharedPromptMemory

_FAMILIES = {"Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"}
"""Whose layers are norm, attention, norm, gated MLP, with residuals; some norm the heads too."""
_ACTIVATIONS = {"silu": functional.silu, "gelu": functools.partial(functional.gelu, approximate="tanh")}
_ROTATIONS_OF_A_PASS = {"dynamic", "longrope"}
"""Whose angles depend on the longest text in a pass."""


class CompiledStep:
    """One token more for each row.

    Args:
        kernels: of this machine.
        module: a model that :func:`compiled_step` knows; weights may come later.
    """

    def __init__(self, kernels: CPUKernels, module: Any) -> None:
        self._kernels, self._module = kernels, module
        self._settings = _settings_of(module)
        self._pass: DecoderPass | None = None
        self._positions = 0

    def forget(self) -> None:
        """The weights are others from now on, or gone."""
        self._pass = None

    def __call__(self, memory: SharedPromptMemory, tokens: Tensor) -> Tensor:
        """(rows, vocab) logits after ``tokens``, (rows,), the newest of the rows."""
        positions = memory.prompt_room + memory.own_room + 1
        if self._pass is None or positions > self._positions:
            self._positions = max(positions, self._positions)
            self._pass = self._kernels.decoder_pass(_decoder_of(self._module, self._settings, self._positions))
        return self._pass(self._module.model.embed_tokens(tokens), memory.own, memory.shared, memory.places)


def compiled_step(kernels: CPUKernels | None, module: Any) -> CompiledStep | None:
    """The step of a model in fp32 on a CPU; None if there are no kernels, or they do not know such a model."""
    return CompiledStep(kernels, module) if kernels is not None and _is_known(module) else None


# ---- what the C code knows


def _is_known(module: Any) -> bool:
    family = type(module).__name__.removesuffix("ForCausalLM")
    rope = getattr(module.config.get_text_config(), "rope_parameters", None) or {}
    if family not in _FAMILIES or rope.get("rope_type") in _ROTATIONS_OF_A_PASS:
        return False
    layers = module.model.layers
    linear = [part for layer in layers for part in _projections(layer)]
    return (
        all(type(layer).__name__ == f"{family}DecoderLayer" for layer in layers)
        and all(type(part) is nn.Linear for part in [module.lm_head, *linear])
        and len(rules := {norm_rule(norm) for norm in _norms(module.model)}) == 1
        and None not in rules
        and len(activations := {_activation_of(layer.mlp.act_fn) for layer in layers}) == 1
        and None not in activations
    )


def _activation_of(function: nn.Module) -> str | None:
    x = torch.linspace(-4, 4, 65)
    found = function(x)
    return next((name for name, known in _ACTIVATIONS.items() if torch.allclose(known(x), found, atol=1e-6)), None)


def _norms(model: Any) -> list[Any]:
    norms = [model.norm]
    for layer in model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(layer.self_attn)]
    return norms


def _head_norms(attention: Any) -> list[Any]:
    return [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]


def _projections(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    into_heads = [attention.q_proj, attention.k_proj, attention.v_proj]
    return [*into_heads, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


# ---- the model, as it is described to the C code


def _settings_of(module: Any) -> dict[str, Any]:
    """Of all layers."""
    layer = module.model.layers[0]
    eps, offset = norm_rule(module.model.norm) or (0.0, 0.0)
    activation = _activation_of(layer.mlp.act_fn)
    head_dim, scale = layer.self_attn.head_dim, layer.self_attn.scaling
    return {"head_dim": head_dim, "scale": scale, "eps": eps, "offset": offset, "activation": activation}


def _decoder_of(module: Any, settings: dict[str, Any], positions: int) -> Decoder:
    model = module.model
    return Decoder(
        [_layer_of(layer) for layer in model.layers],
        model.norm.weight,
        _linear_of(module.lm_head),
        _rotation_of(model, positions),
        **settings,
    )


def _layer_of(layer: Any) -> DecoderLayer:
    query, key, value, out, gate, up, down = map(_linear_of, _projections(layer))
    norms = _head_norms(layer.self_attn)
    return DecoderLayer(
        layer.input_layernorm.weight,
        query,
        key,
        value,
        out,
        layer.post_attention_layernorm.weight,
        gate,
        up,
        down,
        (norms[0].weight, norms[1].weight) if norms else None,
        _window_of(layer.self_attn),
    )


def _window_of(attention: Any) -> int | None:
    """As the layer itself hands it to attention: Mistral's is the model's, Llama's and Gemma's code has none."""
    owner = attention.config if type(attention).__name__ == "MistralAttention" else attention
    return getattr(owner, "sliding_window", None)


def _linear_of(part: Any) -> Linear:
    return Linear(part.weight.contiguous(), part.bias)


def _rotation_of(model: Any, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (positions, head_dim / 2) each: the model's own give each number for both halves of a head."""
    ids = torch.arange(positions)[None]
    cos, sin = model.rotary_emb(model.norm.weight, position_ids=ids)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
