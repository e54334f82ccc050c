"""Causal attention over padded rows that several ranks share, registered in Transformers under ``verl_padded``.

A rank that holds all of its rows leaves padded attention to Transformers. Where ranks hold parts of the rows, the
masks that Transformers makes would be those of a part, so this attention makes its own for whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from verl.errors import ConfigError
from verl.utils.transformers_private import ALL_ATTENTION_FUNCTIONS
from verl.utils.ulysses import gather_heads_scatter_seq, heads_for_sequence
from verl.workers.packed_attention import AttentionRule, attend, refuse_unsupported

PADDED_ATTENTION = "verl_padded"


@dataclass(frozen=True)
class Padding:
    """Padding of rows that several ranks share."""

    real: Tensor
    """(bsz, length) bool, of whole rows: False for padding."""
    group: dist.ProcessGroup
    """Ranks that each hold an equal part of every row."""


def padded_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    padding: Padding | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extras: object,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer for this rank's part of the rows. Collective over ``padding.group``.

    Arguments and errors as for :func:`verl.workers.packed_attention.packed_attention_forward`, with ``padding`` in
    place of ``packing``: query (bsz, heads, length / ranks, head_dim), key and value likewise.

    Returns:
        (bsz, length / ranks, heads, head_dim), and None for the attention weights.
    """
    if padding is None:
        raise ConfigError(f"{type(module).__name__} cannot run with rows that ranks share (it passes no arguments on).")
    refuse_unsupported(module, "with rows that ranks share", attention_mask, extras)
    q, k, v = heads_for_sequence((query, key, value), padding.group)
    rule = AttentionRule(q.shape[-1] ** -0.5 if scaling is None else scaling, dropout, sliding_window, softcap)
    output = attend(q, k, v, rule, padding.real)
    return gather_heads_scatter_seq(output.transpose(1, 2), 2, 1, padding.group), None


ALL_ATTENTION_FUNCTIONS.register(PADDED_ATTENTION, padded_attention_forward)
