import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.trainer.balance import layout_for_ranks
from verl.utils.seqlen_balancing import get_reverse_idx


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
    seed=st.integers(0, 99),
)
def test_every_mini_batch_holds_the_same_samples_on_any_number_of_ranks(dp, minis, share, balance, seed):
    total = dp * minis * share
    lengths = np.random.default_rng(seed).integers(1, 50, total).tolist()
    order, ranks = layout_for_ranks(lengths, dp_size=dp, sizes=[dp * share] * minis, balance=balance)
    assert sorted(order) == list(range(total))
    size = total // minis
    for mini in range(minis):
        members = {i for rank in ranks for i in rank[mini * share : (mini + 1) * share]}
        assert members == set(range(mini * size, (mini + 1) * size))
    assert [order[i] for i in get_reverse_idx(order)] == list(range(total))
