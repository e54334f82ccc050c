"""Divergences over the whole vocabulary and log-probs of candidates, against full logits in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from verl.errors import SchemaError
from verl.workers.engine.model.divergence import FullDivergence, OutputMatrix, vocabulary_divergence
from verl.workers.engine.model.head import LogitRule, TopTokens, token_log_probs

KINDS = ("forward_kl", "reverse_kl", "jsd")
N, H, V = 9, 5, 11


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def policy(rows: int = V) -> OutputMatrix:
    weight, bias = drawn(rows, H, seed=1).requires_grad_(), drawn(rows, seed=2).requires_grad_()
    return OutputMatrix(weight=weight, bias=bias, rule=LogitRule(2.0, softcap=3.0), temperature=0.7)


TEACHERS = (
    OutputMatrix(weight=drawn(V, H - 1, seed=3), bias=None, rule=LogitRule(0.5), temperature=0.9),
    OutputMatrix(weight=drawn(V + 2, H + 2, seed=4), bias=drawn(V + 2, seed=5), rule=LogitRule()),
)


def log_softmax(hidden: Tensor, matrix: OutputMatrix, size: int = V) -> Tensor:
    """Of full logits, of the first ``size`` tokens."""
    logits = hidden[:, : matrix.weight.shape[1]] @ matrix.weight.T + (0 if matrix.bias is None else matrix.bias)
    logits = matrix.rule.scale * logits
    if matrix.rule.softcap is not None:
        logits = matrix.rule.softcap * torch.tanh(logits / matrix.rule.softcap)
    return (logits[:, :size] / matrix.temperature).log_softmax(-1)


def divergence_of(p: Tensor, q: Tensor, kind: str, beta: float, least: float) -> Tensor:
    """The formulas as they stand in the documentation."""

    def log(x: Tensor) -> Tensor:
        return x.log().clamp_min(least)

    m = beta * q + (1 - beta) * p
    terms = {
        "forward_kl": q * (log(q) - log(p)),
        "reverse_kl": p * (log(p) - log(q)),
        "jsd": beta * q * (log(q) - log(m)) + (1 - beta) * p * (log(p) - log(m)),
    }
    return terms[kind].sum(-1)


@pytest.mark.proof("by hand", *KINDS)
def test_by_hand():
    # p = (1/4, 3/4), q = (1/2, 1/2) by logits (0, ln 3) and (0, 0):
    # forward: ½ ln 2 + ½ ln ⅔ = 0.1438410;   reverse: ¼ ln ½ + ¾ ln 3/2 = 0.1308120
    # jsd, β = ½: 0.0338216, as in tests/algorithms/test_distillation.py
    ours = OutputMatrix(weight=torch.tensor([[0.0], [3.0]]).log1p() * 0, bias=None, rule=LogitRule())
    ours = replace(ours, bias=torch.tensor([1.0, 3.0]).log())
    teacher = OutputMatrix(weight=torch.zeros(2, 1), bias=None, rule=LogitRule())
    for kind, value in zip(KINDS, (0.1438410, 0.1308120, 0.0338216), strict=True):
        spec = FullDivergence(kind=kind, teachers=[teacher])
        found = vocabulary_divergence(torch.ones(1, 1), ours, torch.ones(1, 1), None, spec)
        assert_close(found.divergence, torch.tensor([value]))
        assert_close(found.teacher_entropy, torch.tensor([2.0]).log())


@pytest.mark.proof("oracle", param="kind")
@pytest.mark.proof("gradient", param="kind")
@pytest.mark.parametrize("least", [None, -2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_full_logits_in_any_chunking(kind: str, least: float | None):
    """Two teachers of other widths and more rows; a softcap, a bias, temperatures; values, gradients and metrics."""
    hidden, ours = drawn(N, H).requires_grad_(), policy()
    of_teachers, index = drawn(N, H + 2, seed=6), torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])
    log_q = torch.stack([log_softmax(of_teachers[i : i + 1], TEACHERS[int(t)])[0] for i, t in enumerate(index)])
    p = log_softmax(hidden, ours).exp()
    expected = divergence_of(p, log_q.exp(), kind, 0.3, -torch.inf if least is None else least)
    grads = torch.autograd.grad((expected * torch.arange(1, N + 1)).sum(), (hidden, ours.weight, ours.bias))
    for chunk in (1, 2 * V, 1000):
        spec = FullDivergence(kind=kind, teachers=TEACHERS, beta=0.3, log_prob_min=least)
        found = vocabulary_divergence(hidden, ours, of_teachers, index, spec, chunk_elements=chunk)
        assert_close(found.divergence, expected)
        found_grads = torch.autograd.grad(
            (found.divergence * torch.arange(1, N + 1)).sum(), (hidden, ours.weight, ours.bias)
        )
        assert_close(found_grads, grads)
        assert_close(found.agreement, (p.argmax(-1) == log_q.argmax(-1)).double())
        assert 0 < found.agreement.sum() < N
        assert_close(found.teacher_entropy, -(log_q.exp() * log_q).sum(-1))
    # Two tokens of the first teacher alone, in fp32.
    one = FullDivergence(kind=kind, teachers=[TEACHERS[0]], beta=0.3, log_prob_min=least)
    small = replace(ours, weight=ours.weight.detach().float(), bias=ours.bias.detach().float())
    rows = [0, 3]
    found = vocabulary_divergence(hidden[rows].detach().float(), small, of_teachers[rows].float(), None, one)
    assert_close(found.divergence.double(), expected[rows].detach(), rtol=1e-5, atol=1e-6)


def test_a_policy_with_more_tokens_than_its_teacher():
    """Padding of its matrix: no divergence of it, and no gradient."""
    hidden, ours, of_teacher = drawn(N, H), policy(V + 3), drawn(N, H - 1, seed=6)
    spec = FullDivergence(kind="reverse_kl", teachers=TEACHERS[:1])
    found = vocabulary_divergence(hidden, ours, of_teacher, None, spec).divergence
    p, q = log_softmax(hidden, ours).exp(), log_softmax(of_teacher, TEACHERS[0]).exp()
    assert_close(found, divergence_of(p, q, "reverse_kl", 0.5, -torch.inf))
    found.sum().backward()
    assert ours.weight.grad is not None
    assert ours.weight.grad[V:].eq(0).all()
    assert ours.weight.grad[:V].ne(0).all()


def test_what_is_missing_is_named():
    spec = FullDivergence(kind="jsd", teachers=TEACHERS)
    with pytest.raises(SchemaError, match="2 teachers, and no column 'teacher_index'"):
        vocabulary_divergence(drawn(N, H), policy(), drawn(N, H + 2), None, spec)
    with pytest.raises(SchemaError, match="'teacher_hidden', which the batch lacks"):
        vocabulary_divergence(drawn(N, H), policy(), None, None, spec)
    with pytest.raises(SchemaError, match=r"set engine\.divergence first"):
        vocabulary_divergence(drawn(N, H), policy(), drawn(N, H), None, None)


def test_candidates_and_most_likely_tokens():
    """One of the candidates is the target too, and one comes twice: gradients of the same token add up."""
    hidden, ours = drawn(N, H).requires_grad_(), policy()
    log_p = log_softmax(hidden, ours)
    targets = torch.arange(N) % V
    candidates = torch.stack([log_p.argmax(-1), targets, targets, (targets + 1) % V], dim=-1)
    candidates[::2, 0] = log_p[::2].argmin(-1)
    factors = drawn(N, 5, seed=7)
    chosen = torch.cat([targets[:, None], candidates], dim=-1)
    variables = hidden, ours.weight, ours.bias
    grads = torch.autograd.grad((log_p.gather(-1, chosen) * factors).sum(), variables)
    for chunk in (1, 3 * V, 1000):
        found = token_log_probs(
            hidden, ours.weight, ours.bias, targets, 0.7,
            rule=ours.rule, chunk_elements=chunk, candidates=candidates, top=TopTokens(3),
        )  # fmt: skip
        assert found.topk_log_probs is not None
        assert_close(found.topk_log_probs, log_p.gather(-1, candidates))
        assert_close(found.agreement, (torch.arange(N) % 2).double())
        values, ids = log_p.topk(3)
        assert_close((found.top_log_probs, found.top_ids), (values.detach(), ids))
        total = (found.log_probs * factors[:, 0]).sum() + (found.topk_log_probs * factors[:, 1:]).sum()
        assert_close(torch.autograd.grad(total, variables), grads)
