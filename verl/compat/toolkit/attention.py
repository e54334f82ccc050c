"""Remove padding before attention and put it back; by PyTorch alone, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Select rows; gradients flow to the chosen ones."""
    return tensor.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Join the tokens of all rows to one sequence, without padding.

    Args:
        hidden_states: (bsz, length, ...)
        attention_mask: (bsz, length), true at tokens.
        unused_mask: (bsz, length), true at places that are kept although no token is there.

    Returns:
        the tokens, (total, ...); their places in the flattened batch, (total,); the boundaries of the rows,
        (bsz + 1,) int32; the length of the longest row; and the number of tokens in each row, without unused places,
        (bsz,) int32.
    """
    mask = attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    boundaries = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, boundaries, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo :func:`unpad_input`: (bsz, length, ...) with zeros at padding."""
    rows = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return rows.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
