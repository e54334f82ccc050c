"""What the C code of a decoding step is told about keys and values, layers and whole decoders: its structs.

A struct holds addresses. Whoever makes one keeps the tensors alive, and changes them in place at will.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

_FLOAT, _INT64, _POINTER = ctypes.c_float, ctypes.c_int64, ctypes.c_void_p


class Norm(NamedTuple):
    """An RMS norm: the factor is ``offset + weight``."""

    weight: Tensor
    eps: float
    offset: float = 0.0


class Linear(NamedTuple):
    """x ↦ weight · x + bias."""

    weight: Tensor
    """(out, in)"""
    bias: Tensor | None = None
    """(out,)"""


class RowsOfMemory(NamedTuple):
    """Where each row of a batch keeps keys and values; (rows,) int64 each."""

    slots: Tensor
    """Place among the responses."""
    lengths: Tensor
    """Tokens there."""
    prompts: Tensor
    """Place among the prompts."""
    prompt_lengths: Tensor
    """Tokens there."""


@dataclass(frozen=True)
class DecoderLayer:
    """x + o · attention(norm(x)), then x + down · (act(gate · norm(x)) ∘ (up · norm(x)))."""

    input_norm: Tensor
    """Its weight."""
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    post_norm: Tensor
    """Its weight."""
    gate: Linear
    up: Linear
    down: Linear
    head_norms: tuple[Tensor, Tensor] | None = None
    """Weights of the RMS norms of each head of queries and of keys."""
    window: int | None = None
    """Tokens that a token sees, itself included; None is all."""


@dataclass(frozen=True)
class Decoder:
    """A decoder without its embeddings; all tensors fp32 and contiguous.

    Attributes:
        layers: at least one.
        norm: weight of the last norm.
        head: from the last norm to logits.
        rotation: cosines and sines by position, (positions, head_dim / 2) each: the halves (a, b) of a head become
            (a·cos - b·sin, b·cos + a·sin).
        head_dim: of queries, keys and values.
        scale: of the scores.
        eps: of all norms.
        offset: of all norms, whose factor is ``offset + weight``.
        activation: of the gate: ``silu``, or ``gelu`` by its formula with tanh.
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
    """Of its first element."""
    return None if tensor is None else tensor.data_ptr()


def memory_struct(own: tuple[Tensor, Tensor], shared: tuple[Tensor, Tensor], rows: RowsOfMemory) -> MemoryStruct:
    """Of keys and values (…, places, kv_heads, room, head_dim), of one layer or all."""
    slots, lengths, prompts, prompt_lengths = map(address, rows)
    apart = [states[0].stride(0) if states[0].dim() == 5 else 0 for states in (own, shared)]
    rooms = own[0].shape[-2], shared[0].shape[-2]
    return MemoryStruct(
        slots, lengths, prompts, prompt_lengths, *map(address, (*own, *shared)), *apart, len(rows.slots), *rooms
    )


def decoder_struct(decoder: Decoder) -> DecoderStruct:
    """See :class:`Decoder`."""
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
    norms: Any = (layer.input_norm, layer.post_norm, *(layer.head_norms or (None, None)))
    parts = layer.query, layer.key, layer.value, layer.out, layer.gate, layer.up, layer.down
    return LayerStruct(*map(address, norms), *map(_linear_struct, parts), layer.window or 0)


def _linear_struct(linear: Linear) -> LinearStruct:
    return LinearStruct(address(linear.weight), address(linear.bias), *linear.weight.shape)
