"""Convert padded batches to nested tensors without padding, and what a model gave for them back to responses."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor


def left_right_2_no_padding(data: TensorDict) -> TensorDict:
    """Replace padded columns, prompts padded on the left and responses on the right, by nested ones without padding.

    Args:
        data: input_ids, attention_mask and position_ids, each (bsz, prompt_length + response_length), and
            response_mask (bsz, response_length).

    Returns:
        all columns of ``data``, with input_ids and position_ids jagged: row i has as many tokens as its attention_mask;
        also ``loss_mask``, which is response_mask, and the numbers ``max_seq_len`` and ``max_response_len``.
    """
    mask = data["attention_mask"].bool()
    offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    unpadded = data.copy()
    for name in ("input_ids", "position_ids"):
        unpadded[name] = torch.nested.nested_tensor_from_jagged(data[name][mask], offsets)
    unpadded["loss_mask"] = data["response_mask"]
    unpadded.set_non_tensor("max_seq_len", mask.shape[1])
    unpadded.set_non_tensor("max_response_len", data["response_mask"].shape[1])
    return unpadded


def no_padding_2_padding(nested_tensor: Tensor, data: TensorDict) -> Tensor:
    """Return what a model gave for the response tokens, padded on the right with 0: (bsz, response_length, ...).

    The value of a response token stands at the position before it, where the model predicts it.

    Args:
        nested_tensor: one value per token of the unpadded sequences, jagged or (tokens, ...); what is padded already,
            (bsz, response_length, ...), as losses of distillation get it, is returned as it is.
        data: attention_mask (bsz, prompt_length + response_length) and responses (bsz, response_length) of the batch.
    """
    values = nested_tensor.values() if nested_tensor.is_nested else nested_tensor
    # Sequences of one token each, whose number would be bsz, have no response.
    if not nested_tensor.is_nested and values.shape[:2] == data["responses"].shape:
        return values
    mask = data["attention_mask"].to(values.device)
    size = data["responses"].shape[1]
    lengths = mask[:, -size:].sum(1)  # of the responses
    steps = torch.arange(size, device=values.device)
    first = mask.sum(1).cumsum(0) - lengths - 1  # position of the value of each first response token
    is_response = steps < lengths[:, None]
    padded = values.new_zeros((*is_response.shape, *values.shape[1:]))
    padded[is_response] = values[(first[:, None] + steps)[is_response]]
    return padded
