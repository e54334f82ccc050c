"""Sequences without padding, and values of response tokens, by hand."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import tensor

from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

# prompts of 1 and 2 tokens, responses of 2 and 1
IDS = tensor([[0, 5, 6, 7], [3, 4, 8, 0]])
MASK = tensor([[0, 1, 1, 1], [1, 1, 1, 0]])


def batch() -> TensorDict:
    columns = {
        "input_ids": IDS,
        "attention_mask": MASK,
        "position_ids": tensor([[0, 0, 1, 2], [0, 1, 2, 2]]),
        "responses": IDS[:, 2:],
        "response_mask": MASK[:, 2:],
    }
    return TensorDict(columns, batch_size=2)


def test_by_hand():
    data = batch()
    unpadded = left_right_2_no_padding(data)
    assert [row.tolist() for row in unpadded["input_ids"].unbind()] == [[5, 6, 7], [3, 4, 8]]
    assert [row.tolist() for row in unpadded["position_ids"].unbind()] == [[0, 1, 2], [0, 1, 2]]
    assert unpadded["loss_mask"].tolist() == [[1, 1], [1, 0]]
    assert (unpadded["max_seq_len"], unpadded["max_response_len"]) == (4, 2)
    assert not data["input_ids"].is_nested  # the given batch stays
    # values 10 11 12 | 20 21 22: 6 and 7 are predicted at 10 and 11, 8 at 21
    values = torch.nested.nested_tensor_from_jagged(tensor([10.0, 11, 12, 20, 21, 22]), tensor([0, 3, 6]))
    assert no_padding_2_padding(values, unpadded).tolist() == [[10.0, 11.0], [21.0, 0.0]]
    both = torch.stack([values.values(), -values.values()], -1)  # two values per token, flat
    assert no_padding_2_padding(both, unpadded)[1].tolist() == [[21.0, -21.0], [0.0, 0.0]]
