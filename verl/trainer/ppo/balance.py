"""Which rank gets which sample: equal counts, balanced tokens, and mini-batches that no layout changes."""

from __future__ import annotations

from collections.abc import Sequence

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def layout_for_ranks(
    seqlens: Sequence[int], *, dp_size: int, num_mini_batches: int, balance: bool
) -> tuple[list[int], list[list[int]]]:
    """Order the samples so that a contiguous split over ranks cuts every mini-batch evenly.

    Mini-batch ``k`` is always the ``k``-th contiguous part of the batch as it came, whatever the
    number of ranks: the optimizer sees the same samples in the same steps on 1 rank and on 64.
    Inside each mini-batch the samples are dealt out to the ranks, by length if ``balance``. ::

        4 samples, 2 mini-batches, 2 ranks        rank 0: mb 0, mb 1 | rank 1: mb 0, mb 1
        order = [0, 2, 1, 3]                              0     2            1     3

    Args:
        seqlens: tokens of each sample, prompt and response.
        dp_size: number of data-parallel ranks.
        num_mini_batches: optimizer steps that one pass over the batch makes.
        balance: deal by length, so that ranks get about equal tokens, instead of in order.

    Returns:
        the order (a permutation of the samples), and for each rank the samples that it gets.

    Raises:
        ValueError: the batch does not divide into ``dp_size * num_mini_batches`` equal parts.
    """
    total, parts = len(seqlens), dp_size * num_mini_batches
    if total % parts:
        raise ValueError(
            f"{total} samples do not divide into {num_mini_batches} mini-batches of {dp_size} equal rank parts."
        )
    size = total // num_mini_batches
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    for start in range(0, total, size):
        members = range(start, start + size)
        if balance and dp_size > 1:
            shares = get_seqlen_balanced_partitions([seqlens[i] for i in members], dp_size, equal_size=True)
        else:
            share = size // dp_size
            shares = [list(range(rank * share, (rank + 1) * share)) for rank in range(dp_size)]
        for rank, picked in zip(ranks, shares, strict=True):
            rank.extend(start + i for i in sorted(picked))
    return [i for rank in ranks for i in rank], ranks
