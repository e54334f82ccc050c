"""Balanced parts: every sequence once, equal counts, budgets kept, close to even."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import ConfigError
from verl.utils.seqlen_balancing import (
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    micro_batches_by_tokens,
)


def sums(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


def test_by_hand():
    # largest differencing of 8 7 6 5 4: 8-7=1, 6-5=1, 4-1=3, 3-1=2, so the two sums differ by 2
    parts = get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(sums([8, 7, 6, 5, 4], parts)) == [14, 16]
    # two each: 10+1 and 9+2
    assert sorted(sums([10, 9, 2, 1], get_seqlen_balanced_partitions([10, 9, 2, 1], 2, equal_size=True))) == [11, 11]


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=24), k=st.integers(1, 8), equal=st.booleans())
def test_every_sequence_in_exactly_one_part(lengths: list[int], k: int, equal: bool):
    k = min(k, len(lengths))
    if equal:
        lengths = lengths[: len(lengths) // k * k]
    parts = get_seqlen_balanced_partitions(lengths, k, equal_size=equal)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert len(parts) == k
    assert all(part == sorted(part) and part for part in parts)
    if equal:
        assert {len(part) for part in parts} == {len(lengths) // k}
    assert parts == get_seqlen_balanced_partitions(list(lengths), k, equal_size=equal)


@pytest.mark.parametrize("equal", [True, False])
def test_parts_are_nearly_even(equal: bool):
    rng = random.Random(0)
    lengths = [rng.randint(50, 2000) for _ in range(256)]
    totals = sums(lengths, get_seqlen_balanced_partitions(lengths, 8, equal_size=equal))
    assert max(totals) - min(totals) <= 10  # of about 32,800 tokens each


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match=r"2 sequences cannot make 3 parts"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(ValueError, match=r"5 sequences do not divide into 2 parts of equal size"):
        get_seqlen_balanced_partitions([1] * 5, 2, equal_size=True)


def test_micro_batches_by_hand():
    assert micro_batches_by_tokens([6, 4, 5, 5], 10) == [[0, 1], [2, 3]]
    assert micro_batches_by_tokens([6, 4, 5, 5], 20) == [[0, 1, 2, 3]]
    assert sorted(map(sorted, micro_batches_by_tokens([6, 6, 6], 11))) == [[0], [1], [2]]
    assert micro_batches_by_tokens([], 10) == []
    assert micro_batches_by_tokens([1, 1, 1], 10, min_count=5) == [[0], [1], [2]]
    assert sorted(len(part) for part in micro_batches_by_tokens([1, 1, 1], 10, min_count=2)) == [1, 2]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20), room=st.integers(0, 60), min_count=st.integers(1, 24)
)
def test_micro_batches_keep_the_budget(lengths: list[int], room: int, min_count: int):
    budget = max(max(lengths) + room, 1)
    parts = micro_batches_by_tokens(lengths, budget, min_count)
    totals = sums(lengths, parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert all(part for part in parts)
    assert max(totals) <= budget
    assert totals == sorted(totals, reverse=True)
    assert len(parts) >= min(min_count, len(lengths))
    if min_count == 1:
        assert len(parts) <= 2 * sum(lengths) / budget + 1  # all but one part more than half full


def fewest_possible(lengths: list[int], budget: int) -> int:
    """Oracle: try every assignment."""
    for count in range(1, len(lengths) + 1):
        for choice in itertools.product(range(count), repeat=len(lengths)):
            if all(
                sum(n for n, c in zip(lengths, choice, strict=True) if c == part) <= budget for part in range(count)
            ):
                return count
    raise AssertionError


@pytest.mark.parametrize("seed", range(12))
def test_micro_batches_are_nearly_the_fewest(seed: int):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 10) for _ in range(6)]
    found = len(micro_batches_by_tokens(lengths, 12))
    assert found - fewest_possible(lengths, 12) in (0, 1)


def test_min_count_gives_exactly_that_many_if_the_budget_allows():
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    for count in range(4, 9):
        assert len(micro_batches_by_tokens(lengths, 12, min_count=count)) == count


def test_a_sequence_over_the_budget_says_what_to_do():
    with pytest.raises(ConfigError, match=r"sequence of 30 tokens.*micro-batch of 20.*ppo_max_token_len_per_gpu"):
        micro_batches_by_tokens([5, 30], 20)


def test_unbalance_metrics_by_hand():
    # in order: 1+2 and 3+4; dealt: 1+4 and 2+3
    assert log_seqlen_unbalance([1, 2, 3, 4], [[0, 3], [1, 2]], "global_seqlen") == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 7,
        "global_seqlen/minmax_diff": 4,
        "global_seqlen/balanced_min": 5,
        "global_seqlen/balanced_max": 5,
        "global_seqlen/mean": 5.0,
    }


@given(order=st.permutations(range(9)))
def test_reverse_index_undoes_a_permutation(order: list[int]):
    undo = get_reverse_idx(order)
    assert [order[i] for i in undo] == list(range(9))
    assert [undo[i] for i in order] == list(range(9))
