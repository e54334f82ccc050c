"""What counts as rounding when a model is compared with its own forward pass."""

from __future__ import annotations

import pytest
import torch

from verl.workers.forward_check import is_rounding


@pytest.mark.parametrize("difference, is_small", [(0.04, True), (0.06, False)])
def test_a_dimension_of_hundreds_does_not_hide_a_difference_in_another(difference, is_small):
    # bf16 allows 5 % of the largest number of each dimension, and 0.05 where that is below 1.
    expected = torch.tensor([[300.0, 0.5], [-200.0, 0.1]])
    found = expected + torch.tensor([[0.0, 0.0], [0.0, difference]])
    assert is_rounding(found, expected, torch.bfloat16) == is_small
    assert is_rounding(expected + torch.tensor([14.0, 0.0]), expected, torch.bfloat16)
    assert not is_rounding(expected + torch.tensor([16.0, 0.0]), expected, torch.bfloat16)


def test_log_probs_are_compared_with_the_largest_of_all():
    expected = torch.tensor([-20.0, -0.1])
    assert is_rounding(expected + 0.9, expected, torch.bfloat16)
    assert not is_rounding(expected + 1.1, expected, torch.bfloat16)
    assert not is_rounding(torch.tensor([-20.0, float("nan")]), expected, torch.bfloat16)
