"""Assignment of a batch's rows to data-parallel ranks: equal row counts, balanced tokens, fixed mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.protocol import DataProto
from verl.utils.metric import Metrics
from verl.utils.seqlen_balancing import get_reverse_idx, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.workers.engine.non_finite import NonFinite, in_batch_order


def layout_for_ranks(
    seqlens: Sequence[int], *, dp_size: int, num_mini_batches: int, balance: bool
) -> tuple[list[int], list[list[int]]]:
    """Order the samples so that a contiguous split over ranks divides every mini-batch evenly.

    Mini-batch ``k`` is the ``k``-th contiguous part of the batch for any number of ranks, so that an optimizer step
    uses the same samples on 1 rank and on 64. Inside a mini-batch, samples are assigned to ranks. ::

        4 samples, 2 mini-batches, 2 ranks        rank 0: mb 0, mb 1 | rank 1: mb 0, mb 1
        order = [0, 2, 1, 3]                              0     2            1     3

    Args:
        seqlens: tokens of each sample, prompt and response.
        dp_size: number of data-parallel ranks.
        num_mini_batches: optimizer steps of one pass over the batch.
        balance: assign by length, so that ranks get about equal tokens; otherwise in order.

    Returns:
        the order (a permutation of the samples), and the samples of each rank.

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


@dataclass(frozen=True)
class DealtBatch:
    """A batch whose rows are ordered for a contiguous split over ranks."""

    rows: DataProto
    order: list[int]
    """Index of each row in the original batch."""
    num_ranks: int
    metrics: Metrics
    """``global_seqlen/...``: how evenly tokens are spread over the ranks."""

    def restore(self, made: DataProto) -> DataProto:
        """Put the ranks' results into the order of the original batch; a result without rows is returned as it is."""
        return made.select_idxs(get_reverse_idx(self.order)) if len(made) else made

    def problems(self, found: Sequence[NonFinite]) -> list[NonFinite]:
        """Non-finite values, with each rank's row index replaced by the index in the original batch."""
        return in_batch_order(found, self.order, self.num_ranks)


def deal(
    batch: DataProto,
    num_ranks: int,
    *,
    balance: bool,
    columns: Sequence[str] | None = None,
    num_mini_batches: int = 1,
    rows_per_unit: int = 1,
) -> DealtBatch:
    """Order a batch for its data-parallel ranks; see :func:`layout_for_ranks`.

    Args:
        batch: rows in the order of the data.
        num_ranks: number of data-parallel ranks.
        balance: assign by length.
        columns: tensors sent to the ranks; None sends all columns.
        num_mini_batches: optimizer steps of one pass over the batch.
        rows_per_unit: adjacent rows that stay together: 1, or 2 for the sides of a pair.
    """
    unit = rows_per_unit
    lengths = batch.batch["attention_mask"].view(len(batch) // unit, -1).sum(-1).tolist()
    order, ranks = layout_for_ranks(lengths, dp_size=num_ranks, num_mini_batches=num_mini_batches, balance=balance)
    by_row = [unit * i + row for i in order for row in range(unit)]
    sent = batch if columns is None else batch.select(batch_keys=list(columns), non_tensor_batch_keys=[])
    metrics = log_seqlen_unbalance(lengths, ranks, "global_seqlen")
    return DealtBatch(sent.select_idxs(by_row), by_row, num_ranks, metrics)
