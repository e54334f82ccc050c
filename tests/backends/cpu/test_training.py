"""The compiled parts of a layer in training against their formulas in fp64, values and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.cpu import normal, threads_fixture
from verl.backends.cpu.kernels import FeedForward, Heads, Linear, Norm, TrainingKernels, cpu_kernels


@pytest.fixture
def kernels() -> TrainingKernels:
    found = cpu_kernels()
    if found is None:
        pytest.skip("no C compiler here")
    return found.training


threads = threads_fixture(1, 2, 3)


def leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double().requires_grad_()


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return (offset + weight) * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def assert_near(found: Sequence[Tensor | None], leaves: Sequence[Tensor | None]) -> None:
    """The error of each gradient is a small part of its norm."""
    for number, (ours, theirs) in enumerate(zip(found, leaves, strict=True)):
        assert (ours is None) == (theirs is None), number
        if ours is not None and theirs is not None:
            assert theirs.grad is not None
            assert (ours.double() - theirs.grad).norm() <= 2e-6 * theirs.grad.norm(), number


# Rows: a few, some of one chunk (96), and several spans (384) and a bit; widths: whole panels (64), and not.
SIZES = [(1, 16, 24), (5, 8, 12), (97, 64, 128), (300, 48, 100), (901, 40, 70)]


@pytest.mark.parametrize(("rows", "hidden", "inner"), SIZES)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("form", ["alone", "between a norm and x", "a norm with an offset"])
def test_feed_forward(
    kernels: TrainingKernels, threads: int, rows: int, hidden: int, inner: int, activation: str, form: str
) -> None:
    x, grad, weight = normal(rows, hidden), normal(rows, hidden, seed=1), normal(hidden, seed=2)
    gate, up, down = (normal(*size, seed=3 + i) / 4 for i, size in enumerate([(inner, hidden)] * 2 + [(hidden, inner)]))
    norm = None if form == "alone" else Norm(weight, 1e-3, 0.0 if form == "between a norm and x" else 1.0)
    adds = form == "between a norm and x"
    part = FeedForward(gate, up, down, norm, activation, adds)
    wide: Any = [leaf(tensor) for tensor in (x, weight if norm else None, gate, up, down)]
    given = normed(wide[0], wide[1], norm.eps, norm.offset) if norm else wide[0]
    a = functional.linear(given, wide[2])
    active = functional.silu(a) if activation == "silu" else functional.gelu(a, approximate="tanh")
    expected = functional.linear(active * functional.linear(given, wide[3]), wide[4]) + (wide[0] if adds else 0)
    expected.backward(grad.double())
    y, kept = kernels.feed_forward(x, part, keep=True)
    assert kept is not None
    assert (y.double() - expected).norm() <= 1e-6 * expected.norm()
    assert_near(kernels.feed_forward_backward(grad, x, kept, part, (True, True, True)), wide)
    alone, nothing = kernels.feed_forward(x, part, keep=False)
    assert nothing is None
    assert alone.equal(y)


@pytest.mark.parametrize("wants", [(False, False, False), (True, True, False), (False, False, True)])
def test_only_the_gradients_that_are_wanted(kernels: TrainingKernels, wants: tuple[bool, bool, bool]) -> None:
    x, gate, up, down = normal(70, 16), normal(24, 16, seed=1), normal(24, 16, seed=2), normal(16, 24, seed=3)
    part = FeedForward(gate, up, down)
    y, kept = kernels.feed_forward(x, part, keep=True)
    assert kept is not None
    everything = kernels.feed_forward_backward(y, x, kept, part, (True, True, True))
    some = kernels.feed_forward_backward(y, x, kept, part, wants)
    for found, whole, wanted in zip(some, everything, (True, False, *wants), strict=True):
        assert (found is not None) == wanted
        assert found is None or (whole is not None and found.equal(whole))


@pytest.mark.parametrize(("rows", "head_dim"), [(1, 4), (70, 12), (500, 64), (130, 128)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("with_head_norms", [False, True])
@pytest.mark.parametrize("with_biases", [False, True])
def test_heads(
    kernels: TrainingKernels,
    threads: int,
    rows: int,
    head_dim: int,
    with_norm: bool,
    with_head_norms: bool,
    with_biases: bool,
) -> None:
    hidden, counts = 40, (3, 1, 1)
    x, other = normal(rows, hidden), normal(rows, hidden, seed=1)
    weights = [normal(n * head_dim, hidden, seed=i) / 6 for i, n in enumerate(counts)]
    biases = [normal(n * head_dim, seed=i + 9) if with_biases else None for i, n in enumerate(counts)]
    norms = [normal(size, seed=20 + size) for size in (hidden, head_dim, head_dim)]
    angle = normal(rows, head_dim // 2, seed=30)
    projections: Any = tuple(map(Linear, weights, biases))
    part = Heads(
        projections,
        head_dim,
        angle.cos(),
        angle.sin(),
        Norm(norms[0], 1e-3) if with_norm else None,
        (Norm(norms[1], 1e-4, 1.0), Norm(norms[2], 1e-4, 1.0)) if with_head_norms else None,
    )
    used = [norms[0] if with_norm else None, *(norms[1:] if with_head_norms else (None, None))]
    wide: Any = [leaf(tensor) for tensor in (x, *weights, *biases, *used)]
    given = normed(wide[0], wide[7], 1e-3, 0.0) if with_norm else wide[0]
    expected = [functional.linear(given, wide[i + 1], wide[i + 4]).view(rows, -1, head_dim) for i in range(3)]
    for i in range(2):
        if with_head_norms:
            expected[i] = normed(expected[i], wide[8 + i], 1e-4, 1.0)
        cos, sin = part.cos.double().unsqueeze(1), part.sin.double().unsqueeze(1)
        a, b = expected[i].chunk(2, -1)
        expected[i] = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    grads = [normal(*tensor.shape, seed=40 + i) for i, tensor in enumerate(expected)]
    torch.autograd.backward([*expected, wide[0]], [*(grad.double() for grad in grads), other.double()])
    *found, kept = kernels.project_heads(x, part, keep=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() <= 1e-6 * theirs.norm()
    of_x, *rest = kernels.project_heads_backward(grads, other, x, kept, part, wants_weights=True)
    assert_near([of_x, *rest[0], *rest[1], *rest[2]], wide)
    of_x_alone, of_weights, *_ = kernels.project_heads_backward(grads, None, x, kept, part, wants_weights=False)
    assert of_weights == [None] * 3
    torch.testing.assert_close(of_x_alone + other, of_x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_other", [False, True])
def test_projection(
    kernels: TrainingKernels, threads: int, rows: int, inputs: int, outputs: int, with_bias: bool, with_other: bool
) -> None:
    x, weight, grad = normal(rows, inputs), normal(outputs, inputs, seed=1), normal(rows, outputs, seed=2)
    bias = normal(outputs, seed=3) if with_bias else None
    other = normal(rows, outputs, seed=4) if with_other else None
    wide: Any = [leaf(tensor) for tensor in (x, weight, bias)]
    expected = functional.linear(*wide)
    expected.backward(grad.double())
    part = Linear(weight, bias)
    y = kernels.project(x, part, other).double()
    assert (y - expected - (0 if other is None else other)).norm() <= 1e-6 * expected.norm()
    assert_near(kernels.project_backward(grad, x, part, (True, True, True)), wide)
    assert kernels.project_backward(grad, x, part, (False, False, False)) == (None, None, None)


@pytest.mark.parametrize("shape", [(1, 7), (130, 64), (3, 50, 40)])
def test_norm_backward(kernels: TrainingKernels, threads: int, shape: tuple[int, ...]) -> None:
    x, weight, grad = normal(*shape), normal(shape[-1], seed=1), normal(*shape, seed=2)
    wide: Any = leaf(x), leaf(weight)
    normed(*wide, 1e-3, 1.0).backward(grad.double())
    assert_near(kernels.rms_norm_backward(grad, x, Norm(weight, 1e-3, 1.0)), wide)


def test_a_row_is_the_same_bits_whatever_the_others_are(kernels: TrainingKernels, threads: int) -> None:
    x, weight = normal(200, 40), normal(40, seed=1)
    part = FeedForward(normal(70, 40, seed=2), normal(70, 40, seed=3), normal(40, 70, seed=4), Norm(weight, 1e-6))
    projection = Linear(normal(33, 40, seed=5))
    y, z = kernels.feed_forward(x, part, keep=False)[0], kernels.project(x, projection)
    for first, last in ((0, 1), (3, 200), (100, 107)):
        rows = x[first:last].contiguous()
        assert kernels.feed_forward(rows, part, keep=False)[0].equal(y[first:last])
        assert kernels.project(rows, projection).equal(z[first:last])


def test_one_two_or_four_threads_give_the_same_gradients_of_weights(kernels: TrainingKernels) -> None:
    x, projection = normal(901, 40), Linear(normal(70, 40, seed=1))
    part = FeedForward(normal(70, 40, seed=2), normal(70, 40, seed=3), normal(40, 70, seed=4))
    grad, found = normal(901, 70, seed=5), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            y, kept = kernels.feed_forward(x, part, keep=True)
            assert kept is not None
            layer = kernels.feed_forward_backward(y, x, kept, part, (True, True, True))
            found.append([*layer, *kernels.project_backward(grad, x, projection, (True, True, False))])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(a is b or a.equal(b) for a, b in zip(found[0], others, strict=True))


def test_what_is_not_finite_stays_in_its_row(kernels: TrainingKernels) -> None:
    x = normal(100, 24)
    part = FeedForward(normal(40, 24, seed=1), normal(40, 24, seed=2), normal(24, 40, seed=3), adds=True)
    good = kernels.feed_forward(x, part, keep=False)[0]
    x[7, 3] = float("nan")
    y = kernels.feed_forward(x, part, keep=False)[0]
    assert y[7].isnan().all()
    others = [row for row in range(100) if row != 7]
    assert y[others].equal(good[others])
