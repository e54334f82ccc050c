"""Decoding steps of known Transformers models as one call of compiled code, in fp32 on a CPU.

The model looks up its embeddings; :class:`verl.backends.cpu.kernels.DecoderPass` computes the rest up to the logits on
the trainer's weights, without copying them. Models are recognised by class names and settings, so callers must compare
the result with the model's own forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl.backends.cpu.kernels import Decoder, DecoderLayer, DecoderPass, Linear, RowsOfMemory, cpu_kernels
from verl.backends.cpu.layers import attention_window
from verl.backends.replaced_layers import activation_of, norm_rule

# Models whose layers are norm, attention, norm, gated MLP, with residuals; some have norms of heads too.
_FAMILIES = {"Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"}
# Rotary embeddings whose angles depend on the longest text in a pass; a table by position cannot express them.
ROTATIONS_OF_A_PASS = {"dynamic", "longrope"}

KeysAndValues = tuple[Tensor, Tensor]
"""Keys and values of all layers, (layers, places, kv_heads, tokens, head_dim) each."""


class CompiledDecoder:
    """Decoding step of one model, made by :func:`compiled_decoder`; the model's weights may be loaded later."""

    def __init__(self, module: Any) -> None:
        self._module = module
        attention, mlp = module.model.layers[0].self_attn, module.model.layers[0].mlp
        eps, offset = norm_rule(module.model.norm) or (0.0, 0.0)
        self._settings = {
            "head_dim": attention.head_dim,
            "scale": attention.scaling,
            "eps": eps,
            "offset": offset,
            "activation": activation_of(mlp.act_fn),
        }
        self._pass: DecoderPass | None = None
        self._positions = 0

    def forget(self) -> None:
        """Drop everything derived from the model; call it when weights or attention windows are replaced or dropped."""
        self._pass = None

    def __call__(self, tokens: Tensor, responses: KeysAndValues, shared: KeysAndValues, rows: RowsOfMemory) -> Tensor:
        """Append ``tokens``, (rows,), and return (rows, vocab) logits of the next; see :class:`DecoderPass`."""
        positions = responses[0].shape[3] + shared[0].shape[3] + 1
        if self._pass is None or positions > self._positions:
            self._positions = max(positions, self._positions)
            kernels = cpu_kernels()
            assert kernels is not None
            self._pass = kernels.decoder_pass(self._description())
        return self._pass(self._module.model.embed_tokens(tokens), responses, shared, rows)

    def _description(self) -> Decoder:
        model = self._module.model
        # Transformers repeats each cosine and sine for both halves of a head; the kernel takes one half.
        cos, sin = model.rotary_emb(model.norm.weight, position_ids=torch.arange(self._positions)[None])
        half = cos.shape[-1] // 2
        rotation = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        layers = [_describe(layer) for layer in model.layers]
        return Decoder(layers, model.norm.weight, _linear(self._module.lm_head), rotation, **self._settings)


def compiled_decoder(module: Any) -> CompiledDecoder | None:
    """Return the decoding step of an fp32 model; None without a C compiler or for an unsupported architecture."""
    family = type(module).__name__.removesuffix("ForCausalLM")
    rope = getattr(module.config.get_text_config(), "rope_parameters", None) or {}
    if cpu_kernels() is None or family not in _FAMILIES or rope.get("rope_type") in ROTATIONS_OF_A_PASS:
        return None
    layers = module.model.layers
    linear = [part for layer in layers for part in _projections(layer)]
    norms = [module.model.norm]
    for layer in layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(layer.self_attn)]
    rules = {norm_rule(norm) for norm in norms}
    activations = {activation_of(layer.mlp.act_fn) for layer in layers}
    is_known = (
        all(type(layer).__name__ == f"{family}DecoderLayer" for layer in layers)
        and all(type(part) is nn.Linear for part in [module.lm_head, *linear])
        and len(rules) == len(activations) == 1
        and None not in rules | activations
    )
    return CompiledDecoder(module) if is_known else None


def _describe(layer: Any) -> DecoderLayer:
    query, key, value, out, gate, up, down = map(_linear, _projections(layer))
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
        attention_window(layer.self_attn),
    )


def _projections(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    into_heads = [attention.q_proj, attention.k_proj, attention.v_proj]
    return [*into_heads, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _head_norms(attention: object) -> list[Any]:
    return [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]


def _linear(part: Any) -> Linear:
    return Linear(part.weight.contiguous(), part.bias)
