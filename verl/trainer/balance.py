"""Assignment of a batch's rows to data-parallel ranks: equal row counts, balanced tokens, fixed mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from verl.protocol import DataProto, replace_columns
from verl.schema import COUNTED
from verl.utils.metric import Metrics
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.workers.engine.non_finite import NonFinite, in_batch_order
from verl.workers.shared_prompts import Siblings

INPUTS_OF_ROWS = ("multi_modal_inputs",)
"""Columns of objects that passes of a model read."""


def layout_for_ranks(
    seqlens: Sequence[int], *, dp_size: int, sizes: Sequence[int], balance: bool, siblings: Siblings | None = None
) -> tuple[list[int], list[list[int]]]:
    """Order the samples so that a contiguous split over ranks divides every mini-batch evenly.

    Mini-batch ``k`` is the ``k``-th contiguous part of the batch for any number of ranks, so that an optimizer step
    uses the same samples on 1 rank and on 64. Inside a mini-batch, samples are assigned to ranks. ::

        4 samples, mini-batches of 2, 2 ranks     rank 0: mb 0, mb 1 | rank 1: mb 0, mb 1
        order = [0, 2, 1, 3]                              0     2            1     3

    Args:
        seqlens: tokens of each sample, prompt and response.
        dp_size: number of data-parallel ranks.
        sizes: samples of each mini-batch (optimizer step of one pass over the batch).
        balance: assign by length, so that ranks get about equal tokens; otherwise in order.
        siblings: samples whose prompt is computed once on a rank. Each group goes to one rank, if the groups of a
            mini-batch have equal sizes and divide over the ranks. Else groups are cut where the ranks' parts end: in
            order, or with ``balance`` also with the longest assigned first, whichever gives the busiest rank fewer
            tokens. A prompt counts once on each rank that has rows of it.

    Returns:
        the order (a permutation of the samples), and the samples of each rank.

    Raises:
        ValueError: the samples are not those of the mini-batches, or a mini-batch does not divide over the ranks.
    """
    if sum(sizes) != len(seqlens) or any(size % dp_size for size in sizes):
        raise ValueError(
            f"{len(seqlens)} samples do not divide into mini-batches of {', '.join(map(str, sizes))} samples with "
            f"{dp_size} equal rank parts."
        )
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    start = 0
    for size in sizes:
        members = range(start, start + size)
        if siblings is not None and dp_size > 1:
            shares = _shares_of_siblings(members, dp_size, balance, siblings)
        elif balance and dp_size > 1:
            shares = get_seqlen_balanced_partitions([seqlens[i] for i in members], dp_size, equal_size=True)
        else:
            share = size // dp_size
            shares = [list(range(rank * share, (rank + 1) * share)) for rank in range(dp_size)]
        for rank, picked in zip(ranks, shares, strict=True):
            rank.extend(start + i for i in sorted(picked))
        start += size
    return [i for rank in ranks for i in rank], ranks


def _shares_of_siblings(members: range, dp_size: int, balance: bool, siblings: Siblings) -> list[list[int]]:
    """Places in ``members`` of each rank's samples, with siblings together where equal parts allow it."""
    groups = [[row for row in group if row in members] for group in siblings.groups]
    groups = [group for group in groups if group]
    if len({len(group) for group in groups}) == 1 and len(groups) % dp_size == 0:
        share = len(groups) // dp_size
        parts = [list(range(rank * share, (rank + 1) * share)) for rank in range(dp_size)]
        if balance:
            costs = [siblings.tokens(group) for group in groups]
            parts = get_seqlen_balanced_partitions(costs, dp_size, equal_size=True)
        return [[row - members.start for index in part for row in groups[index]] for part in parts]
    share = len(members) // dp_size
    rows = [row for group in groups for row in group]
    shares = [rows[rank * share : (rank + 1) * share] for rank in range(dp_size)]
    if balance:
        # Neither is always the better one: with the longest first, short groups are cut where no rank has room for all.
        candidates = _longest_first(groups, dp_size, share, siblings), shares
        shares = min(candidates, key=lambda ranks: max(siblings.tokens_of_any(rows) for rows in ranks))
    return [[row - members.start for row in rows] for rows in shares]


def _longest_first(groups: list[list[int]], dp_size: int, share: int, siblings: Siblings) -> list[list[int]]:
    """Assign groups to ranks of ``share`` samples each, those with the most tokens first; return each rank's samples.

    A group goes to the rank with the fewest tokens that has room for all of it; if none has, the rank with the most
    room takes a part.
    """
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    tokens = [0] * dp_size
    for group in sorted(groups, key=siblings.tokens, reverse=True):
        rest = group
        while rest:
            rank = min(range(dp_size), key=lambda r: (max(0, len(rest) - share + len(shares[r])), tokens[r]))
            room = share - len(shares[rank])
            part, rest = rest[:room], rest[room:]
            tokens[rank] += siblings.tokens(part)
            shares[rank] += part
    return shares


@dataclass(frozen=True)
class DealtBatch:
    """A batch whose rows are ordered for a contiguous split over ranks."""

    rows: DataProto
    order: list[int]
    """Index of each row in the original batch; of a padding row, that of the row which it repeats."""
    num_ranks: int
    metrics: Metrics
    """``global_seqlen/...``: how evenly tokens are spread over the ranks."""
    sizes: list[int]
    """Rows of each mini-batch on each rank."""
    padding: frozenset[int] = field(default_factory=frozenset)
    """Positions of ``rows`` that are padding."""

    def restore(self, result: DataProto) -> DataProto:
        """Put the ranks' results into the order of the original batch; a result without rows is returned as it is."""
        if not len(result):
            return result
        position = {row: n for n, row in enumerate(self.order) if n not in self.padding}
        return result.select_idxs([position[row] for row in range(len(position))])

    def problems(self, problems: Sequence[NonFinite]) -> list[NonFinite]:
        """Non-finite values, with each rank's row index replaced by the index in the original batch."""
        return in_batch_order(problems, self.order, self.num_ranks)


def deal(
    batch: DataProto,
    num_ranks: int,
    *,
    balance: bool,
    columns: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    rows_per_unit: int = 1,
    pads: bool = False,
    shares_prompts: bool = False,
) -> DealtBatch:
    """Order a batch for its data-parallel ranks; see :func:`layout_for_ranks`.

    Args:
        batch: rows in the order of the data.
        num_ranks: number of data-parallel ranks.
        balance: assign by length.
        columns: tensors sent to the ranks, with the inputs of images; None sends all columns.
        sizes: units of each mini-batch; None for one of all.
        rows_per_unit: adjacent rows that stay together: 1, or 2 for the sides of a pair.
        pads: fill up mini-batches that do not divide over the ranks. A padding row repeats the shortest row of its
            mini-batch, with :data:`verl.schema.COUNTED` 0, so that it adds nothing to a loss.
        shares_prompts: keep rows with the same prompt on one rank, which computes it once; see
            :func:`layout_for_ranks`. Only for units of one row.
    """
    unit = rows_per_unit
    lengths = batch.batch["attention_mask"].view(len(batch) // unit, -1).sum(-1).tolist()
    unit_indices, is_padding, padded_sizes = _padded(lengths, sizes or [len(lengths)], num_ranks if pads else 1)
    lengths = [lengths[i] for i in unit_indices]
    siblings = Siblings.from_batch(batch.select_idxs(unit_indices)) if shares_prompts else None
    order, ranks = layout_for_ranks(lengths, dp_size=num_ranks, sizes=padded_sizes, balance=balance, siblings=siblings)
    by_row = [unit * unit_indices[i] + row for i in order for row in range(unit)]
    input_columns = [name for name in INPUTS_OF_ROWS if name in batch.non_tensor_batch]
    sent = batch if columns is None else batch.select(batch_keys=list(columns), non_tensor_batch_keys=input_columns)
    rows = sent.select_idxs(by_row)
    padding = frozenset(n for n, i in enumerate(order) if is_padding[i])
    if padding:
        rows = _without_weight(rows, sorted(padding))
    metrics = log_seqlen_unbalance(lengths, ranks, "global_seqlen")
    per_rank = [size * unit // num_ranks for size in padded_sizes]
    return DealtBatch(rows, by_row, num_ranks, metrics, per_rank, padding)


def _padded(lengths: Sequence[int], sizes: Sequence[int], multiple: int) -> tuple[list[int], list[bool], list[int]]:
    """The units of each mini-batch and then its padding, which of them is padding, and the padded sizes."""
    unit_indices: list[int] = []
    is_padding: list[bool] = []
    padded_sizes: list[int] = []
    start = 0
    for size in sizes:
        members = list(range(start, start + size))
        missing = -size % multiple
        shortest = min(members, key=lambda i: lengths[i])
        unit_indices += members + [shortest] * missing
        is_padding += [False] * size + [True] * missing
        padded_sizes.append(size + missing)
        start += size
    return unit_indices, is_padding, padded_sizes


def _without_weight(rows: DataProto, padding: list[int]) -> DataProto:
    changed: dict[str, torch.Tensor] = {}
    for name in COUNTED:
        if name in rows.batch.keys():
            changed[name] = rows.batch[name].clone()
            changed[name][padding] = 0
    return replace_columns(rows, DataProto.from_dict(tensors=changed)) if changed else rows
