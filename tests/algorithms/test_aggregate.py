"""agg_loss: every mode by hand, the partition law, masked places, empty rows, gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verl.algorithms import LOSS_AGG_MODES, agg_loss, compute_entropy_loss, prepare_aggregation
from verl.errors import ConfigError

LOSS = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])

BY_HAND = {
    "token-mean": 7 / 3,  # (1 + 2 + 4) / 3 tokens
    "token-sum": 7.0,
    "seq-mean-token-sum": 3.5,  # (3 + 4) / 2 sequences
    "seq-mean-token-mean": 2.75,  # (1.5 + 4) / 2
    "seq-mean-token-sum-norm": 7 / 6,  # (3/3 + 4/3) / 2
    "prompt-mean": 2.75,  # two prompts of one response each: (3/2 + 4/1) / 2
}
INDEX = ["a", "b"]


@pytest.mark.proof("by hand", param="mode")
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_by_hand(mode: str):
    assert_close(agg_loss(LOSS, MASK, mode, index=INDEX), torch.tensor(BY_HAND[mode]))


@pytest.mark.proof("by hand", "prompt-mean")
def test_prompt_mean_by_hand():
    loss = torch.tensor([[1.0, 2.0], [6.0, 9.0], [5.0, 7.0], [9.0, 9.0], [9.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0], [0, 0]])
    # a: tokens 1 2 6 of rows 0 and 1, mean 3. b: tokens 5 7, mean 6; its row 3 is empty. c has no token.
    index = np.array(["a", "a", "b", "b", "c"], dtype=object)
    assert_close(agg_loss(loss, mask, "prompt-mean", index=index), torch.tensor(4.5))
    weights = prepare_aggregation("prompt-mean", mask, index)["row_weights"]
    assert_close(weights, torch.tensor([1 / 6, 1 / 6, 1 / 4, 1 / 4, 0.0]))
    assert_close(agg_loss(loss, mask, "prompt-mean", dp_size=2, row_weights=weights), torch.tensor(9.0))


@pytest.mark.proof("reductions", "prompt-mean")
def test_prompt_mean_reductions():
    # every prompt with one response: seq-mean-token-mean; all of one prompt: token-mean
    assert_close(agg_loss(LOSS, MASK, "prompt-mean", index=[0, 1]), agg_loss(LOSS, MASK, "seq-mean-token-mean"))
    assert_close(agg_loss(LOSS, MASK, "prompt-mean", index=[0, 0]), agg_loss(LOSS, MASK, "token-mean"))


@pytest.mark.parametrize(
    "ids",
    [[7, "7", 7], np.array([1, "1", 1], dtype=object), torch.tensor([5, 3, 5]), [("a", 1), ("a", 2), ("a", 1)]],
)
def test_group_ids_of_any_kind_are_told_apart_by_value(ids):
    weights = prepare_aggregation("prompt-mean", torch.ones(3, 2), ids)["row_weights"]
    assert weights.tolist() == [1 / 8, 1 / 4, 1 / 8]  # two groups, of four tokens and of two


def test_prompt_mean_needs_groups():
    with pytest.raises(ConfigError, match=r"needs to know which rows share a prompt: pass row_weights"):
        agg_loss(LOSS, MASK, "prompt-mean")
    with pytest.raises(ConfigError, match=r"got 3 group ids for 2 rows"):
        agg_loss(LOSS, MASK, "prompt-mean", index=[0, 0, 1])


def test_other_modes_prepare_nothing():
    assert all(prepare_aggregation(mode, MASK, INDEX) == {} for mode in LOSS_AGG_MODES if mode != "prompt-mean")


@pytest.mark.proof("by hand", param="mode")
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 2 * 7 / 10),  # dp 2, 10 tokens in the mini-batch
        ("token-sum", 14.0),
        ("seq-mean-token-sum", 2 * 7 / 8),  # 8 sequences
        ("seq-mean-token-mean", 2 * 5.5 / 8),
        ("seq-mean-token-sum-norm", 2 * 7 / 8 / 5),  # scale 5
    ],
)
def test_global_counts_by_hand(mode: str, expected: float):
    loss = agg_loss(LOSS, MASK, mode, dp_size=2, batch_num_tokens=10, global_batch_size=8, loss_scale_factor=5)
    assert_close(loss, torch.tensor(expected))


def slow_agg(loss: torch.Tensor, mask: torch.Tensor, mode: str) -> float:
    """The definition, sequence by sequence and token by token."""
    sums, means, tokens = [], [], 0
    for row, valid in zip(loss.tolist(), mask.tolist(), strict=True):
        kept = [x for x, m in zip(row, valid, strict=True) if m]
        tokens += len(kept)
        sums.append(sum(kept))
        means.append(sum(kept) / len(kept) if kept else 0.0)
    rows = len(sums)
    return {
        "token-mean": sum(sums) / max(tokens, 1),
        "token-sum": sum(sums),
        "seq-mean-token-sum": sum(sums) / rows,
        "seq-mean-token-mean": sum(means) / rows,
        "seq-mean-token-sum-norm": sum(sums) / rows / loss.shape[1],
        "prompt-mean": slow_prompt_mean(loss, mask),
    }[mode]


def slow_prompt_mean(loss: torch.Tensor, mask: torch.Tensor) -> float:
    """Rows 0 1, 2 3, ... are siblings."""
    groups: dict[int, list[float]] = {}
    for row, (values, valid) in enumerate(zip(loss.tolist(), mask.tolist(), strict=True)):
        groups.setdefault(row // 2, []).extend(x for x, m in zip(values, valid, strict=True) if m)
    means = [sum(kept) / len(kept) for kept in groups.values() if kept]
    return sum(means) / len(means) if means else 0.0


@st.composite
def mini_batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """A mini-batch of ragged responses, empty ones among them, and a partition of its rows."""
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    loss = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))).long()
    labels = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    parts = [[i for i in range(rows) if labels[i] == label] for label in set(labels)]
    return loss, mask, parts


@pytest.mark.proof("partition", param="mode")
@pytest.mark.proof("oracle", param="mode")
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=60, deadline=None)
@given(batch=mini_batches(), dp_size=st.integers(1, 4))
def test_partition_law(mode: str, batch: tuple, dp_size: int):
    """The parts of any split into micro-batches and ranks add up to the loss of the whole, gradients too."""
    loss, mask, parts = batch
    totals = {"dp_size": dp_size, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(loss)}
    index = [row // 2 for row in range(len(loss))]
    made = prepare_aggregation(mode, mask, index)
    whole = loss.clone().requires_grad_()
    split = loss.clone().requires_grad_()
    value = agg_loss(whole, mask, mode, index=index)
    value.backward()
    total = sum(
        agg_loss(split[rows], mask[rows], mode, **totals, **{k: v[rows] for k, v in made.items()}) / dp_size
        for rows in parts
    )
    total.backward()
    assert_close(total, value)
    assert_close(split.grad, whole.grad)
    assert value.item() == pytest.approx(slow_agg(loss, mask, mode), rel=1e-6, abs=1e-7)  # weights are float32


def test_partition_law_fails_without_global_counts():
    # Two micro-batches averaged by their own counts: (1.5 + 4) / 2 is not 7 / 3.
    split = (agg_loss(LOSS[:1], MASK[:1], "token-mean") + agg_loss(LOSS[1:], MASK[1:], "token-mean")) / 2
    assert abs(split.item() - 7 / 3) > 0.1


@pytest.mark.proof("masks", param="mode")
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_places_are_never_read(mode: str, garbage: float):
    loss = LOSS.masked_fill(MASK == 0, garbage).requires_grad_()
    value = agg_loss(loss, MASK, mode, index=INDEX)
    value.backward()
    assert_close(value, torch.tensor(BY_HAND[mode]))
    assert (loss.grad[MASK == 0] == 0).all()
    assert (loss.grad[MASK == 1] > 0).all()


@pytest.mark.proof("edges", param="mode")
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_no_valid_token_gives_zero_with_a_graph(mode: str):
    loss = torch.ones(2, 3, requires_grad=True)
    value = agg_loss(loss, torch.zeros(2, 3), mode, index=INDEX)
    value.backward()
    assert value.item() == 0.0
    assert (loss.grad == 0).all()


def test_an_empty_response_counts_as_a_sequence():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert_close(agg_loss(LOSS, mask, "seq-mean-token-sum"), torch.tensor(1.5))
    assert_close(agg_loss(LOSS, mask, "seq-mean-token-mean"), torch.tensor(0.75))


def test_inputs_stay_as_they_are():
    loss, mask = LOSS.clone(), MASK.clone()
    for mode in LOSS_AGG_MODES:
        assert agg_loss(loss, mask, mode, index=INDEX).dtype == torch.float32
    assert_close(loss, LOSS)
    assert_close(mask, MASK)


def test_unknown_mode_is_named():
    with pytest.raises(ConfigError, match=r"'token_mean'.*Did you mean 'token-mean'.*seq-mean-token-sum-norm"):
        agg_loss(LOSS, MASK, "token_mean")


def test_entropy_loss_by_hand():
    # Two tokens: uniform over 2 (H = ln 2) and over 4 of 4 (H = ln 4); a third is masked garbage.
    logits = torch.tensor([[[0.0, 0.0, -math.inf, -math.inf], [1.0, 1.0, 1.0, 1.0], [math.nan] * 4]])
    mask = torch.tensor([[1, 1, 0]])
    assert_close(compute_entropy_loss(logits, mask), torch.tensor((math.log(2) + math.log(4)) / 2))
    assert_close(
        compute_entropy_loss(logits, mask, "seq-mean-token-sum", global_batch_size=2),
        torch.tensor((math.log(2) + math.log(4)) / 2),
    )
