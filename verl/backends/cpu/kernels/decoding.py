"""Arguments of the C code for decoding: decoders, layers, keys and values, and their ctypes structs.

A struct holds addresses of tensors, not references: the caller keeps the tensors alive, and may change them in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

_FLOAT, _INT64, _POINTER = ctypes.c_float, ctypes.c_int64, ctypes.c_void_p


class Norm(NamedTuple):
    """RMS norm x ↦ (offset + weight) · x / sqrt(mean(x²) + eps)."""

    weight: Tensor
    eps: float
    offset: float = 0.0


class Linear(NamedTuple):
    """Linear layer x ↦ weight · x + bias."""

    weight: Tensor
    """(out, in)"""
    bias: Tensor | None = None
    """(out,)"""


class RowsOfMemory(NamedTuple):
    """Places of the keys and values of each row of a batch; (rows,) int64 each."""

    slots: Tensor
    """Index of the row's response."""
    lengths: Tensor
    """Number of its tokens in memory."""
    prompts: Tensor
    """Index of the row's prompt."""
    prompt_lengths: Tensor
    """Number of its tokens."""


@dataclass(frozen=True)
class DecoderLayer:
    """Decoder layer: x += out · attention(norm(x)), then x += down · (act(gate · norm(x)) ∘ (up · norm(x)))."""

    input_norm: Tensor
    """Weight of the norm before attention."""
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    post_norm: Tensor
    """Weight of the norm before the feed-forward part."""
    gate: Linear
    up: Linear
    down: Linear
    head_norms: tuple[Tensor, Tensor] | None = None
    """Weights of the RMS norms of each head of queries and of keys."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None is all."""


@dataclass(frozen=True)
class Decoder:
    """A decoder without its embeddings; all tensors fp32 and contiguous.

    Attributes:
        layers: at least one.
        norm: weight of the last norm.
        head: projection from the last norm to logits.
        rotation: cosines and sines by position, (positions, head_dim / 2) each; the halves (a, b) of a head become
            (a·cos - b·sin, b·cos + a·sin).
        scale: factor of the attention scores.
        eps: ε of all norms.
        offset: offset of all norms; see :class:`Norm`.
        activation: activation of the gate, ``silu`` or ``gelu`` (tanh approximation).
    """

    layers: Sequence[DecoderLayer]
    norm: Tensor
    head: Linear
    rotation: tuple[Tensor, Tensor]
    head_dim: int
    scale: float
    eps: float
    offset: float = 0.0
    activation: str = "silu"


# ---- the structs; decoding.c has the same


class MemoryStruct(ctypes.Structure):
    """``Memory``."""

    _fields_ = (
        *((name, _POINTER) for name in ("slots", "own_lengths", "prompts", "shared_lengths")),
        *((name, _POINTER) for name in ("own_k", "own_v", "shared_k", "shared_v")),
        *((name, _INT64) for name in ("own_apart", "shared_apart", "rows", "own_room", "shared_room")),
    )


class AttentionStruct(ctypes.Structure):
    """``Attention``."""

    _fields_ = (
        *((name, _INT64) for name in ("heads", "kv", "d", "window")),
        *((name, _FLOAT) for name in ("scale", "eps", "offset")),
        *((name, _POINTER) for name in ("q_norm", "k_norm", "cos", "sin")),
    )


class LinearStruct(ctypes.Structure):
    """``Linear``."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("n", _INT64), ("k", _INT64))


class LayerStruct(ctypes.Structure):
    """``Layer``."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, LinearStruct) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("window", _INT64),
    )


class DecoderStruct(ctypes.Structure):
    """``Decoder``."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        ("norm", _POINTER),
        ("head", LinearStruct),
        ("cos", _POINTER),
        ("sin", _POINTER),
        *((name, _INT64) for name in ("count", "hidden", "heads", "kv", "d", "is_gelu")),
        *((name, _FLOAT) for name in ("scale", "eps", "offset")),
    )


def address(tensor: Tensor | None) -> int | None:
    """Return the address of the tensor's first element."""
    return None if tensor is None else tensor.data_ptr()


def memory_struct(responses: tuple[Tensor, Tensor], shared: tuple[Tensor, Tensor], rows: RowsOfMemory) -> MemoryStruct:
    """Describe keys and values, ([layers,] places, kv_heads, room, head_dim), of one layer or of all layers."""
    slots, lengths, prompts, prompt_lengths = map(address, rows)
    apart = [states[0].stride(0) if states[0].dim() == 5 else 0 for states in (responses, shared)]
    rooms = responses[0].shape[-2], shared[0].shape[-2]
    return MemoryStruct(
        slots,
        lengths,
        prompts,
        prompt_lengths,
        *map(address, (*responses, *shared)),
        *apart,
        len(rows.slots),
        *rooms,
    )


def decoder_struct(decoder: Decoder) -> DecoderStruct:
    """Describe a whole decoder."""
    first, d = decoder.layers[0], decoder.head_dim
    layers = (LayerStruct * len(decoder.layers))(*map(_layer_struct, decoder.layers))
    sizes = len(decoder.layers), len(decoder.norm), len(first.query.weight) // d, len(first.key.weight) // d, d
    return DecoderStruct(
        layers,
        address(decoder.norm),
        _linear_struct(decoder.head),
        *map(address, decoder.rotation),
        *sizes,
        decoder.activation == "gelu",
        decoder.scale,
        decoder.eps,
        decoder.offset,
    )


def _layer_struct(layer: DecoderLayer) -> LayerStruct:
    norms = (layer.input_norm, layer.post_norm, *(layer.head_norms or (None, None)))
    parts = layer.query, layer.key, layer.value, layer.out, layer.gate, layer.up, layer.down
    return LayerStruct(*map(address, norms), *map(_linear_struct, parts), layer.window or 0)


def _linear_struct(linear: Linear) -> LinearStruct:
    return LinearStruct(address(linear.weight), address(linear.bias), *linear.weight.shape)
