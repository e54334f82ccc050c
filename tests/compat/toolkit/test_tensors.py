"""Functions of tensors for users' trainers, on numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torch import tensor

from verl.compat.toolkit import tensors
from verl.utils import torch_functional


def test_statistics_of_one_process():
    # (1 + 3) / 2 of the valid entries; 1 2 4 7: mean 3.5, deviations -2.5 -1.5 .5 3.5, squares 21, /3 = 7
    assert tensors.distributed_masked_mean(tensor([1.0, 9.0, 3.0]), tensor([1.0, 0.0, 1.0])).item() == 2.0
    assert tensors.distributed_masked_mean(tensor([1.0]), tensor([0.0])).item() == 0.0
    found = tensors.distributed_mean_max_min_std(tensor([1.0, 2.0, 4.0, 7.0]))
    assert [round(value.item(), 6) for value in found] == [3.5, 7.0, 1.0, round(math.sqrt(7), 6)]
    assert tensors.distributed_mean_max_min_std(tensor([1.0, 3.0]), compute_std=False, compute_min=False)[2:] == (
        None,
        None,
    )


def test_values_of_sequences_are_repeated_for_their_tokens():
    nested = torch.nested.as_nested_tensor([torch.zeros(1), torch.zeros(3)], layout=torch.jagged)
    repeated = tensors.expand_as_nested(tensor([0.5, 2.0]), nested)
    assert repeated.values().tolist() == [0.5, 2.0, 2.0, 2.0]
    assert repeated.offsets().tolist() == [0, 1, 4]
    for wrong in (tensor([1.0]), tensor([[1.0, 2.0]])):
        with pytest.raises(AssertionError, match="one value per sequence"):
            tensors.expand_as_nested(wrong, nested)


def test_log_probs_of_responses_with_and_without_padding():
    torch.manual_seed(0)
    ids, mask = tensor([[9, 3, 1, 4], [2, 5, 6, 0]]), tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    logits = torch.randn(2, 4, 10)
    padded = tensors.log_probs_from_logits_response(ids, logits, 2)
    # position t predicts token t + 1
    expected = torch.log_softmax(logits, -1)
    assert padded[0].tolist() == pytest.approx([expected[0, 1, 1].item(), expected[0, 2, 4].item()], abs=1e-6)
    packed = tensors.log_probs_from_logits_response_rmpad(ids, mask, logits[mask.bool()], 2)
    torch.testing.assert_close(packed[0], padded[0])
    torch.testing.assert_close(packed[1, 0], padded[1, 0])  # the second token of that response is padding


def test_rows_are_padded_and_cut():
    ids, mask = tensor([[1, 2, 3, 4, 5]]), torch.ones(1, 5, dtype=torch.long)
    cut = {how: tensors.postprocess_data(ids, mask, 3, 0, truncation=how)[0].tolist() for how in ("left", "right")}
    assert cut == {"left": [[3, 4, 5]], "right": [[1, 2, 3]]}
    assert tensors.postprocess_data(ids, mask, 3, 0, truncation="middle")[0].tolist() == [[1, 4, 5]]
    longer, longer_mask = tensors.postprocess_data(ids, mask, 7, 0)
    assert (longer.tolist(), longer_mask.tolist()) == ([[0, 0, 1, 2, 3, 4, 5]], [[0, 0, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="max_length=3"):
        tensors.postprocess_data(ids, mask, 3, 0)
    assert tensors.remove_pad_token(longer, longer_mask) == [[1, 2, 3, 4, 5]]
    places, ends, longest = tensors.get_unpad_data(tensor([[0, 1, 1], [1, 1, 1]]))
    assert (places.tolist(), ends.tolist(), longest) == ([1, 2, 3, 4, 5], [0, 2, 5], 3)
    parts = tensors.split_dict_tensor_into_batches(TensorDict({"a": torch.arange(4)}, batch_size=[4]), 2)
    assert [part["a"].tolist() for part in parts] == [[0, 1], [2, 3]]


def test_small_functions():
    assert tensors.clip_by_value(tensor([-5.0, 5.0]), tensor([-1.0, 0.0]), tensor([1.0, 2.0])).tolist() == [-1.0, 2.0]
    assert tensors.gather_from_labels(tensor([[1.0, 2.0], [3.0, 4.0]]), tensor([1, 0])).tolist() == [2.0, 3.0]
    logits = tensor([[0.0, 0.0], [0.0, math.log(3)]])  # p = ½ ½ and ¼ ¾
    assert tensors.calculate_sum_pi_squared_from_logits(logits).tolist() == pytest.approx([0.5, 0.625])
    assert tensors.entropy_from_logits_with_chunking(logits, 1)[0].item() == pytest.approx(math.log(2))
    assert tensors.post_process_logits(None, tensor([2.0]), 2.0, 0, 1.0).tolist() == [1.0]
    with pytest.raises(ValueError, match="top_p"):
        tensors.post_process_logits(None, tensor([2.0]), 2.0, 0, 0.9)
    seen = tensors.prepare_decoder_attention_mask(tensor([[0, 1]]), (1, 2), torch.zeros(1, 2, 4))
    assert (seen[0, 0] == 0).tolist() == [[False, False], [False, True]]
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = tensor([[3.0, 4.0]])
    assert tensors.compute_grad_norm(model) == 25.0
    assert torch_functional.clip_by_value is tensors.clip_by_value


def test_the_rate_rises_stays_and_falls():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = tensors.get_wsd_schedule_with_warmup(optimizer, 1, 9, min_lr_ratio=0.2, stable_ratio=0.5)
    rates = []
    for _ in range(10):
        rates.append(round(schedule.get_last_lr()[0], 4))
        optimizer.step()
        schedule.step()
    # warm-up of 1 step at ½, 4 steps at 1, then 0.2 + 0.8·(1 + cos(π·k/4))/2 for k = 0 … 4
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8828, 0.6, 0.3172, 0.2]
