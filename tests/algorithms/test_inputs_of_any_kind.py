"""Estimators and losses take columns however they lie in memory, masks and group ids of any type, half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.estimators import SETTINGS, random_batch
from tests.support.losses import PAIRS, actor, batch, evaluate
from verl.algorithms import compute_advantages, estimator_names, policy_loss_names, prepare_policy_loss
from verl.algorithms.policy_losses.covariance import token_covariance

KINDS_OF_IDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "array of numbers": np.array,
    "array of words": lambda ids: np.array([f"prompt {i}" for i in ids]),
    "tensor": torch.tensor,
    "tuples": lambda ids: [("prompt", i) for i in ids],
}


def strided(column: Any) -> Any:
    """The same values, every other place of a wider memory, its dimensions the other way round."""
    if not isinstance(column, Tensor):
        return column
    wide = torch.stack([column, torch.full_like(column, 7)], dim=-1)
    lying = wide.transpose(0, -2).contiguous().transpose(0, -2) if column.dim() > 1 else wide
    assert not lying[..., 0].is_contiguous()
    return lying[..., 0]


@pytest.mark.parametrize("name", estimator_names())
def test_estimators_take_columns_that_are_not_contiguous(name: str):
    columns = random_batch(3)
    found = compute_advantages(name, {key: strided(column) for key, column in columns.items()}, SETTINGS)
    assert_close(found, compute_advantages(name, columns, SETTINGS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS_OF_IDS)
@pytest.mark.parametrize("name", estimator_names())
def test_group_ids_of_any_kind(name: str, kind: str):
    numbers = [0, 0, 1, 2, 1, 1, 2, 0]
    columns = random_batch(4, numbers)
    found = compute_advantages(name, columns | {"index": KINDS_OF_IDS[kind](numbers)}, SETTINGS)
    assert_close(found, compute_advantages(name, columns, SETTINGS), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_losses_take_columns_that_are_not_contiguous(name: str, mode: str):
    data = batch(4)
    expected, found = evaluate(name, data, mode), evaluate(name, {k: strided(v) for k, v in data.items()}, mode)
    assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@pytest.mark.parametrize("name", policy_loss_names())
def test_losses_take_masks_of_any_type(name: str, dtype: torch.dtype):
    data = batch(4)
    found = evaluate(name, data | {"response_mask": data["response_mask"].to(dtype)}, "token-mean")
    assert_close(found, evaluate(name, data, "token-mean"))


@pytest.mark.parametrize("name", policy_loss_names())
def test_log_probs_in_half_precision_are_summed_in_single(name: str):
    """Of 20000 tokens; a sum that was kept in bfloat16 would stop to grow after a few hundred."""
    data = {key: x.float() if x.is_floating_point() else x for key, x in batch(0, rows=400, width=50).items()}
    data["advantages"] = data["advantages"].abs()
    half = data | {key: data[key].bfloat16() for key in ("log_probs", "old_log_probs")}
    same = data | {key: half[key].float() for key in ("log_probs", "old_log_probs")}
    loss, _, gradient = evaluate(name, half, "token-mean")
    expected, _, _ = evaluate(name, same, "token-mean")
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(0, 4), min_size=1, max_size=30), ratio=st.floats(0, 1))
def test_kl_cov_takes_what_a_stable_sort_puts_first(values: list[int], ratio: float):
    """Covariances on few values, so that many are equal."""
    log_probs = torch.tensor([[*values, 0, 0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0] * len(values) + [-float(len(values)), 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1] * (len(values) + 1) + [0]])
    columns = {"old_log_probs": log_probs, "advantages": advantages, "response_mask": mask}
    chosen = prepare_policy_loss("kl_cov", columns, actor("kl_cov", {"kl_cov_ratio": ratio}), seed=0)["cov_selected"]
    order = token_covariance(log_probs, advantages, mask)[0, :-1].argsort(descending=True, stable=True).tolist()
    count = max(int(ratio * (len(values) + 1)), 1) if ratio > 0 else 0
    assert chosen.nonzero()[:, 1].tolist() == sorted(order[:count])
