"""The critic's loss: by hand, gradient, mask, partition law."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from verl.algorithms import LOSS_AGG_MODES, compute_value_loss, prepare_aggregation


def test_by_hand():
    # c = 0.5
    # v=2.0 v_old=1.0 R=3: plain 1, clipped to 1.5: 2.25 (larger)    → 1.125
    # v=1.2 v_old=1.0 R=0: not clipped, 1.44                         → 0.72
    # v=5.0 v_old=1.0 R=0: plain 25 (larger), clipped to 1.5: 2.25   → 12.5
    vpreds, values, returns = tensor([[2.0, 1.2, 5.0, 8.0]]), torch.ones(1, 4), tensor([[3.0, 0.0, 0.0, 0.0]])
    mask = tensor([[1, 1, 1, 0]])
    loss, fraction = compute_value_loss(vpreds, returns, values, mask, cliprange_value=0.5)
    assert_close(loss, tensor((1.125 + 0.72 + 12.5) / 3))
    assert_close(fraction, tensor(1 / 3))


def test_without_a_clip_it_is_half_the_mean_square():
    vpreds, returns = torch.randn(3, 4), torch.randn(3, 4)
    loss, fraction = compute_value_loss(vpreds, returns, torch.zeros(3, 4), torch.ones(3, 4), cliprange_value=1e9)
    assert_close(loss, 0.5 * ((vpreds - returns) ** 2).mean())
    assert fraction == 0.0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradient_and_partition_law(mode: str):
    torch.manual_seed(0)
    vpreds, returns, values = (torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    mask = tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]])

    def loss(v: torch.Tensor) -> torch.Tensor:
        return compute_value_loss(v, returns, values, mask, 0.5, mode, index=["a", "a", "b", "b"])[0]

    assert torch.autograd.gradcheck(loss, vpreds.clone().requires_grad_())
    totals = {"dp_size": 2, "batch_num_tokens": 6, "global_batch_size": 4}
    made = prepare_aggregation(mode, mask, ["a", "a", "b", "b"])
    parts = [
        compute_value_loss(
            vpreds[rows], returns[rows], values[rows], mask[rows], 0.5, mode, **totals,
            **{name: column[rows] for name, column in made.items()},
        )[0] / 2
        for rows in ([0, 2], [1], [3])
    ]  # fmt: skip
    assert_close(sum(parts), loss(vpreds))


def test_masked_places_are_never_read():
    vpreds = tensor([[1.0, math.nan]], requires_grad=True)
    loss, fraction = compute_value_loss(
        vpreds, tensor([[0.0, math.inf]]), tensor([[1.0, math.nan]]), tensor([[1, 0]]), 0.5
    )
    loss.backward()
    assert_close(loss, tensor(0.5))
    assert fraction == 0.0
    assert_close(vpreds.grad, tensor([[1.0, 0.0]]))
