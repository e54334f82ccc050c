"""Masked statistics, log-probs, entropy, padding and schedules: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from verl.utils.torch_functional import (
    entropy_from_logits,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_eos_mask,
    get_response_mask,
    logprobs_from_logits,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    pad_2d_list_to_length,
    pad_sequence_to_length,
)

VALUES = tensor([[1.0, 2.0, math.nan], [6.0, math.inf, -math.inf]])
MASK = tensor([[1, 1, 0], [1, 0, 0]])


def test_masked_statistics_by_hand():
    assert_close(masked_sum(VALUES, MASK), tensor(9.0))
    assert_close(masked_sum(VALUES, MASK, axis=-1), tensor([3.0, 6.0]))
    assert_close(masked_mean(VALUES, MASK), tensor(3.0))
    assert_close(masked_mean(VALUES, MASK, axis=-1), tensor([1.5, 6.0]))
    assert_close(masked_mean(VALUES, MASK, axis=(0, 1)), tensor(3.0))
    assert_close(masked_var(VALUES, MASK), tensor(7.0))  # (4 + 1 + 9) / 2
    assert_close(masked_var(VALUES, MASK, unbiased=False), tensor(14 / 3))


def test_whitening_by_hand():
    scale = 1 / math.sqrt(7 + 1e-8)
    assert_close(masked_whiten(VALUES, MASK), tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) * scale)
    kept = masked_whiten(VALUES, MASK, shift_mean=False)
    assert_close(masked_mean(kept, MASK), tensor(3.0))
    assert_close(masked_var(kept, MASK), tensor(1.0))


def test_nothing_valid_is_zero():
    nothing = torch.zeros(2, 3)
    for value in (masked_sum, masked_mean, masked_var):
        assert value(VALUES, nothing).item() == 0.0
    assert_close(masked_mean(VALUES, nothing, axis=-1), torch.zeros(2))
    assert (masked_whiten(VALUES, nothing) == 0).all()


def test_a_single_value_has_no_variance():
    assert masked_var(tensor([5.0, 9.0]), tensor([1, 0])).item() == 0.0
    assert_close(masked_whiten(tensor([5.0, 9.0]), tensor([1, 0])), torch.zeros(2))


@pytest.mark.parametrize("statistic", [masked_sum, masked_mean, masked_var])
def test_masked_places_get_no_gradient(statistic):
    values = VALUES.clone().requires_grad_()
    statistic(values, MASK).backward()
    assert torch.isfinite(values.grad).all()
    assert (values.grad[MASK == 0] == 0).all()
    assert (values.grad[MASK == 1] != 0).all()


def test_log_probs_and_entropy_by_hand():
    logits = tensor([[0.0, math.log(3.0)], [1000.0, 0.0]])
    assert_close(logprobs_from_logits(logits, tensor([1, 1])), tensor([math.log(0.75), -1000.0]))
    assert_close(entropy_from_logits(logits), tensor([-0.75 * math.log(0.75) - 0.25 * math.log(0.25), 0.0]))
    assert logprobs_from_logits(logits, tensor([0, -100]))[1] == 0.0


def test_log_probs_are_computed_wide():
    logits = torch.randn(4, 5, 50, dtype=torch.bfloat16)
    labels = torch.randint(50, (4, 5))
    found = logprobs_from_logits(logits, labels)
    assert found.dtype == entropy_from_logits(logits).dtype == torch.float32
    assert found.shape == (4, 5)
    assert_close(found, logits.double().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).float())


def test_log_probs_and_entropy_of_a_large_vocabulary_are_exact():
    logits = 3 * torch.randn(2, 151_936, generator=torch.Generator().manual_seed(0))
    exact = logits.double().log_softmax(-1)
    log_probs = logprobs_from_logits(logits, tensor([7, 8]))
    assert (log_probs - exact[[0, 1], [7, 8]]).abs().max() < 3e-6
    assert (entropy_from_logits(logits) + (exact.exp() * exact).sum(-1)).abs().max() < 1e-5


def test_gradients_of_log_probs_and_entropy():
    logits, labels = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), tensor([0, 3, 1])
    assert torch.autograd.gradcheck(lambda z: logprobs_from_logits(z, labels), logits)
    assert torch.autograd.gradcheck(entropy_from_logits, logits)


def test_forbidden_tokens_have_no_entropy_and_no_bad_gradient():
    logits = tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    assert_close(entropy, tensor([math.log(2.0)]))
    entropy.backward()
    assert torch.isfinite(logits.grad).all()


def test_response_mask_by_hand():
    ids = tensor([[5, 7, 2, 9, 2], [2, 2, 2, 2, 2], [5, 6, 7, 8, 9], [1, 4, 2, 4, 4]])
    expected = tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert_close(get_response_mask(ids, eos_token=2), expected)
    assert_close(get_response_mask(ids, eos_token=[2, 7])[0], tensor([1, 1, 0, 0, 0]))
    assert get_eos_mask(ids, 2, dtype=torch.bool).dtype == torch.bool


def test_padding_by_hand():
    ids = tensor([[1, 2]])
    assert_close(pad_sequence_to_length(ids, 4, 9), tensor([[1, 2, 9, 9]]))
    assert_close(pad_sequence_to_length(ids, 4, 9, left_pad=True), tensor([[9, 9, 1, 2]]))
    assert pad_sequence_to_length(ids, 2, 9) is ids
    assert_close(pad_2d_list_to_length([[1, 2], [], [3]], 0), tensor([[1, 2], [0, 0], [3, 0]]))
    assert_close(pad_2d_list_to_length([[1]], 7, max_length=3), tensor([[1, 7, 7]]))
    assert pad_2d_list_to_length([[]], 7).shape == (1, 0)


def rates(schedule, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def optimizer(lr: float = 2.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_constant_schedule_by_hand():
    opt = optimizer()
    assert rates(get_constant_schedule_with_warmup(opt, 3), opt, 5) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    opt = optimizer()
    assert rates(get_constant_schedule_with_warmup(opt, 0), opt, 2) == [2.0, 2.0]
    # From 0.4 of the peak: 0.4 + 0.6 · ¼, then ½, ¾ and 1 of the way.
    schedule = get_constant_schedule_with_warmup(opt := optimizer(), 3, init_lr_ratio=0.4)
    assert rates(schedule, opt, 4) == pytest.approx([1.1, 1.4, 1.7, 2.0])


def test_cosine_schedule_by_hand():
    # warm-up 1, then from 2.0 to 0.2·... over 4 steps: r + (1-r)(1+cos(π p))/2 for p = 0, ¼, ½, ¾, 1, and after
    opt = optimizer()
    schedule = get_cosine_schedule_with_warmup(opt, 1, 5, min_lr_ratio=0.2)
    half = math.sqrt(0.5)
    factors = [0.5, 1.0, 0.2 + 0.4 * (1 + half), 0.6, 0.2 + 0.4 * (1 - half), 0.2, 0.2]
    assert rates(schedule, opt, 7) == pytest.approx([2 * factor for factor in factors])


def test_cosine_cycles_and_bounds():
    opt = optimizer()
    schedule = get_cosine_schedule_with_warmup(opt, 0, 4, min_lr_ratio=None, num_cycles=1.0)
    assert rates(schedule, opt, 5) == pytest.approx([2.0, 1.0, 0.0, 1.0, 2.0], abs=1e-9)
    opt = optimizer()
    schedule = get_cosine_schedule_with_warmup(opt, 1, 5, init_lr_ratio=0.1)
    assert rates(schedule, opt, 2) == pytest.approx([2 * (0.1 + 0.9 * 0.5), 2.0])
    schedule = get_cosine_schedule_with_warmup(opt := optimizer(), 2, 4, zero_indexed_step=False)
    # 1/2 and 2/2 of the warm-up, then half of the cosine's way
    assert rates(schedule, opt, 3) == pytest.approx([1.0, 2.0, 1.0])
    with pytest.raises(ValueError, match=r"init_lr_ratio=2"):
        get_cosine_schedule_with_warmup(optimizer(), 1, 4, init_lr_ratio=2)
    with pytest.raises(ValueError, match=r"min_lr_ratio=1.5"):
        get_cosine_schedule_with_warmup(optimizer(), 0, 4, min_lr_ratio=1.5)
