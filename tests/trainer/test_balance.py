import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.trainer.balance import layout_for_ranks
from verl.utils.seqlen_balancing import get_reverse_idx
from verl.workers.shared_prompts import Siblings


def test_layout_without_balancing_by_hand():
    # 8 samples, 2 mini-batches (0-3, 4-7), 2 ranks: rank 0 gets the first half of each mini-batch.
    order, ranks = layout_for_ranks([1] * 8, dp_size=2, sizes=[4, 4], balance=False)
    assert ranks == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert order == [0, 1, 4, 5, 2, 3, 6, 7]


def test_layout_balances_tokens_inside_each_mini_batch():
    # One mini-batch of 9 1 1 9: in order rank 0 has 10 and so has rank 1; of 9 9 1 1 it would be 18 and 2.
    order, ranks = layout_for_ranks([9, 9, 1, 1], dp_size=2, sizes=[4], balance=True)
    assert sorted(sum([9, 9, 1, 1][i] for i in rank) for rank in ranks) == [10, 10]
    assert sorted(order) == [0, 1, 2, 3]


def test_siblings_stay_on_one_rank():
    # Four prompts of 6 with two responses each: of 8 and 8, 1 and 1, 7 and 7, 2 and 2. With the prompt once a group has
    # 22, 8, 20 and 10 tokens, so 22 + 8 and 20 + 10 are equal.
    siblings = Siblings([[0, 1], [2, 3], [4, 5], [6, 7]], [6] * 8, [8, 8, 1, 1, 7, 7, 2, 2])
    lengths = [14, 14, 7, 7, 13, 13, 8, 8]
    _, ranks = layout_for_ranks(lengths, dp_size=2, sizes=[8], balance=True, siblings=siblings)
    assert sorted(ranks) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    _, ranks = layout_for_ranks(lengths, dp_size=2, sizes=[4, 4], balance=False, siblings=siblings)
    assert ranks == [[0, 1, 4, 5], [2, 3, 6, 7]]
    # One group on two ranks, and groups that the ranks' parts cut: siblings are apart where they must be.
    _, ranks = layout_for_ranks(lengths[:2], dp_size=2, sizes=[2], balance=True, siblings=siblings)
    assert ranks == [[0], [1]]
    three = Siblings([[0, 2, 4], [1, 3, 5]], [6] * 6, [1] * 6)
    _, ranks = layout_for_ranks([7] * 6, dp_size=3, sizes=[6], balance=True, siblings=three)
    assert ranks == [[0, 2], [4, 5], [1, 3]]
    # Groups of unequal sizes are balanced too: 10, 10, 2, 2 and 1 + 2 + 2 tokens make 15 and 14; in order 22 and 7.
    unequal = Siblings([[0], [1], [2], [3], [4, 5]], [1] * 6, [9, 9, 1, 1, 2, 2])
    lengths = [10, 10, 2, 2, 3, 3]
    _, ranks = layout_for_ranks(lengths, dp_size=2, sizes=[6], balance=True, siblings=unequal)
    assert ranks == [[0, 4, 5], [1, 2, 3]]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    ranks=st.integers(2, 4),
    seed=st.integers(0, 999),
)
def test_balanced_ranks_are_never_busier_than_in_order(sizes, ranks, seed):
    sizes = [*sizes, *[1] * (-sum(sizes) % ranks)]
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, 60, len(sizes)), rng.integers(0, 60, len(group_of))
    groups = [np.flatnonzero(group_of == group).tolist() for group in range(len(sizes))]
    siblings = Siblings(groups, prompts[group_of].tolist(), responses.tolist())
    busiest = {}
    for balance in (True, False):
        lengths = (prompts[group_of] + responses).tolist()
        order, shares = layout_for_ranks(
            lengths, dp_size=ranks, sizes=[len(lengths)], balance=balance, siblings=siblings
        )
        assert sorted(order) == list(range(len(lengths)))
        assert {len(rows) for rows in shares} == {len(lengths) // ranks}
        busiest[balance] = max(responses[rows].sum() + prompts[np.unique(group_of[rows])].sum() for rows in shares)
    assert busiest[True] <= busiest[False]


def test_indivisible_batch_is_refused():
    with pytest.raises(
        ValueError, match="6 samples do not divide into mini-batches of 3, 3 samples with 2 equal rank parts"
    ):
        layout_for_ranks([1] * 6, dp_size=2, sizes=[3, 3], balance=False)


@given(
    dp=st.integers(1, 4),
    minis=st.integers(1, 3),
    share=st.integers(1, 4),
    balance=st.booleans(),
    n=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_every_mini_batch_holds_the_same_samples_on_any_number_of_ranks(dp, minis, share, balance, n, seed):
    total = dp * minis * share
    groups = [list(range(start, min(start + n, total))) for start in range(0, total, n)] if n else []
    siblings = Siblings(groups, [5] * total, [3] * total) if n else None
    lengths = np.random.default_rng(seed).integers(1, 50, total).tolist()
    sizes = [dp * share] * minis
    order, ranks = layout_for_ranks(lengths, dp_size=dp, sizes=sizes, balance=balance, siblings=siblings)
    assert sorted(order) == list(range(total))
    size = total // minis
    for mini in range(minis):
        members = {i for rank in ranks for i in rank[mini * share : (mini + 1) * share]}
        assert members == set(range(mini * size, (mini + 1) * size))
    assert [order[i] for i in get_reverse_idx(order)] == list(range(total))
