"""Log-probs and entropy from hidden states, against full logits and finite differences."""

import math

import pytest
import torch
from torch.testing import assert_close

from verl.workers.engine.model.head import LogitRule, chunk_rows, token_log_probs

RULES = {"plain": LogitRule(), "scaled": LogitRule(0.5), "capped": LogitRule(2.0, softcap=3.0)}


def inputs(rows=7, width=5, vocab=11, dtype=torch.double):
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(size, generator=g, dtype=dtype).requires_grad_()
        for size in ((rows, width), (vocab, width), (vocab,))
    )
    return hidden, weight, bias, torch.randint(0, vocab, (rows,), generator=g)


def test_by_hand():
    # logits 2·(1, 0) = (2, 0), temperature 2 → (1, 0): p = (e, 1) / (e + 1)
    log_probs, entropy, squares = token_log_probs(
        torch.tensor([[2.0]]), torch.tensor([[1.0], [0.0]]), None, torch.tensor([1]), 2.0, True, True
    )[:3]
    z = math.log(math.e + 1)
    p = math.e / (math.e + 1)
    assert_close(log_probs, torch.tensor([-z]))
    assert_close(entropy, torch.tensor([-(p * (1 - z) + (1 - p) * -z)]))
    assert_close(squares, torch.tensor([p**2 + (1 - p) ** 2]))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_equals_full_logits_in_any_chunking(rule):
    hidden, weight, bias, targets = inputs()
    logits = rule.scale * (hidden @ weight.T + bias)
    logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
    full = (logits / 0.7).log_softmax(-1)
    for chunk in (1, 22, 33, 10_000):
        log_probs, entropy, squares = token_log_probs(
            hidden, weight, bias, targets, 0.7, True, True, rule=rule, chunk_elements=chunk
        )[:3]
        assert_close(log_probs, full[torch.arange(7), targets])
        assert_close(entropy, -(full.exp() * full).sum(-1))
        assert_close(squares, full.exp().square().sum(-1))
        assert log_probs.requires_grad
        assert not squares.requires_grad


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_gradients_are_the_finite_differences(rule):
    hidden, weight, bias, targets = inputs()

    def both(h, w, b):
        return token_log_probs(h, w, b, targets, 0.7, True, True, rule=rule, chunk_elements=33)[:2]

    def one(h, w):
        return token_log_probs(h, w, None, targets, 0.7, rule=rule, chunk_elements=33)[0]

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    assert torch.autograd.gradcheck(one, (hidden, weight))


def test_no_rows_give_a_zero_gradient_not_none():
    hidden, weight, _, _ = inputs()
    log_probs, entropy, squares = token_log_probs(hidden[:0], weight, None, torch.zeros(0, dtype=torch.long))[:3]
    assert log_probs.shape == (0,)
    assert entropy is None
    assert squares is None
    log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(0).all()


def test_half_precision_is_reduced_in_fp32():
    hidden, weight, _, targets = inputs(dtype=torch.bfloat16)
    log_probs, _, squares = token_log_probs(hidden, weight, None, targets, with_sum_pi_squared=True)[:3]
    assert log_probs.dtype == squares.dtype == torch.float32
    log_probs.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_the_gradient_of_a_half_precision_head_is_summed_in_fp32_over_chunks():
    # 600 tokens in 75 chunks: summed in bf16, the error would grow from 0.3 % (one chunk) to 1 %.
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(600, 16, generator=draw).bfloat16()
    weight = torch.randn(32, 16, generator=draw).bfloat16().requires_grad_()
    targets = torch.randint(32, (600,), generator=draw)
    token_log_probs(hidden, weight, None, targets, chunk_elements=8 * 32).log_probs.sum().backward()
    exact = weight.detach().double().requires_grad_()
    (hidden.double() @ exact.T).log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    error = (weight.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 4e-3


def test_the_sum_of_squares_of_certain_and_of_forbidden_tokens():
    # p = (1, 0): 1.  p = (1/2, 1/2, 0), the last forbidden by a bias of -inf: 1/2.
    ones = torch.ones(1, 1)
    certain = token_log_probs(ones, torch.tensor([[200.0], [0.0]]), None, torch.tensor([0]), with_sum_pi_squared=True)
    assert_close(certain.sum_pi_squared, torch.ones(1))
    bias = torch.tensor([0.0, 0.0, -math.inf])
    halves = token_log_probs(ones, torch.zeros(3, 1), bias, torch.tensor([0]), with_sum_pi_squared=True)
    assert_close(halves.sum_pi_squared, torch.tensor([0.5]))


def test_a_gpu_computes_more_logits_at_once():
    # 2²⁵ / 151,936 = 220.8 and 2²⁷ / 151,936 = 883.4 tokens; meta stands for a device that is no CPU.
    assert chunk_rows(torch.empty(151_936, 1)) == 220
    assert chunk_rows(torch.empty(151_936, 1, device="meta")) == 883
    assert chunk_rows(torch.empty(33, 1), chunk_elements=8) == 1
