"""Cutting a rank's rows into forward passes, as many on every rank, and adding up their metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.utils.metric import extreme
from verl.utils.seqlen_balancing import micro_batches_by_tokens
from verl.workers.engine.base import BatchTotals, Metrics, MicroBatchConfig, Share
from verl.workers.engine.non_finite import NonFinite
from verl.workers.engine.pass_sizes import cut

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch."""

    rows: list[int]
    data: DataProto
    is_filler: bool
    """Computed only so that all ranks take part in the same collectives; it has no valid token."""
    rows_per_unit: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens with ``response_mask`` 1."""
        return _num_tokens(self.data)

    def unit_lengths(self) -> list[int]:
        """Tokens of each unit, prompts and responses."""
        return _unit_lengths(self.data, self.rows_per_unit)


def _global(values: list[int], device: torch.device, op: dist.ReduceOp.RedOpType) -> list[int]:
    """Integers reduced by ``op`` over all ranks."""
    total = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(total, op=op)
    return total.tolist()


def gathered(mine: list[T]) -> list[T]:
    """What every rank holds, in the order of ranks. Collective."""
    ranks: list[list[T] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return [value for rank in ranks if rank is not None for value in rank]


def batch_totals(batch: DataProto, dp_size: int, device: torch.device) -> BatchTotals:
    """The denominators of the mini-batch of which ``batch`` is this rank's part. Collective."""
    tokens, sequences = _global([_num_tokens(batch), len(batch)], device, dist.ReduceOp.SUM)
    return BatchTotals(dp_size=dp_size, batch_num_tokens=max(tokens, 1), global_batch_size=sequences)


def split_micro_batches(
    batch: DataProto, micro: MicroBatchConfig, device: torch.device, rows_per_unit: int = 1, limit: int | None = None
) -> Iterator[MicroBatch]:
    """The forward passes over ``batch``, the same number on every rank; the last may be fillers. Collective.

    Args:
        batch: this rank's rows.
        micro: size of the passes.
        device: of the process group.
        rows_per_unit: rows k·n to k·n + n - 1 are never parted, and stay in their order.
        limit: tokens of a pass that are known to fit; larger ones are cut, whatever ``micro`` says.

    Raises:
        ConfigError: on every rank, if one has a unit over the token budget.
        SchemaError: the rows do not divide into units.
    """
    if len(batch) % rows_per_unit:
        raise SchemaError(
            f"{len(batch)} rows do not divide into units of {rows_per_unit}: the loss reads so many rows together, and "
            "each rank must get all rows of a unit."
        )
    units = len(batch) // rows_per_unit
    lengths = _unit_lengths(batch, rows_per_unit)
    size = micro.micro_batch_size_per_gpu or units
    parts = [list(range(start, min(start + size, units))) for start in range(0, units, size)]
    if micro.use_dynamic_bsz:
        assert micro.max_token_len_per_gpu is not None
        longest = _global([max(lengths)], device, dist.ReduceOp.MAX)[0]
        budget = micro.max_token_len_per_gpu
        # Over the budget somewhere: every rank finds that out here, and none waits for the others.
        parts = micro_batches_by_tokens(lengths if longest <= budget else [longest], budget)
    parts = cut(parts, lengths, limit)
    count = _global([len(parts)], device, dist.ReduceOp.MAX)[0]
    if micro.use_dynamic_bsz and limit is None:
        assert micro.max_token_len_per_gpu is not None
        parts = micro_batches_by_tokens(lengths, micro.max_token_len_per_gpu, min_count=count)
    for part in parts:
        rows = [unit * rows_per_unit + row for unit in part for row in range(rows_per_unit)]
        yield MicroBatch(rows, batch.select_idxs(rows), is_filler=False, rows_per_unit=rows_per_unit)
    for _ in range(count - len(parts)):
        yield MicroBatch([], _filler(batch, rows_per_unit), is_filler=True, rows_per_unit=rows_per_unit)


def _unit_lengths(batch: DataProto, rows_per_unit: int) -> list[int]:
    assert batch.batch is not None
    return batch.batch["attention_mask"].view(len(batch) // rows_per_unit, -1).sum(-1).tolist()


def _num_tokens(batch: DataProto) -> int:
    assert batch.batch is not None
    return int(batch.batch["response_mask"].sum())


def _filler(batch: DataProto, rows_per_unit: int) -> DataProto:
    """The first unit with empty responses."""
    unit = batch.select_idxs(list(range(rows_per_unit)))
    assert unit.batch is not None
    columns = dict(unit.batch.items())
    columns["response_mask"] = torch.zeros_like(columns["response_mask"])
    return DataProto.from_dict(tensors=columns, meta_info=unit.meta_info)


class MetricSum:
    """Metrics of one mini-batch, from the metrics of its micro-batches on all ranks.

    A mean over the valid tokens of a micro-batch counts by that micro-batch's share of the mini-batch's
    valid tokens, so the result is the mean over all of them, however they are laid out.
    """

    def __init__(self, totals: BatchTotals) -> None:
        self._tokens = totals.batch_num_tokens
        self._values: dict[str, list[tuple[float, torch.Tensor]]] = {}

    def add(self, metrics: Metrics, num_tokens: int) -> None:
        """Take in one micro-batch with ``num_tokens`` valid tokens."""
        for name, value in metrics.items():
            if isinstance(value, Share):
                weight, value = 1.0, value.value
            elif num_tokens == 0:
                continue  # the mean over no token
            else:
                weight = 1.0 if _extreme(name) else num_tokens / self._tokens
            tensor = torch.as_tensor(value).detach()
            self._values.setdefault(name, []).append((weight, tensor))

    def reduce(self, problems: list[NonFinite]) -> tuple[dict[str, float], list[NonFinite]]:
        """The metrics of the mini-batch and the problems of all ranks, the same on every rank. Collective."""
        mine = {name: _combine(name, [w * float(v) for w, v in parts]) for name, parts in self._values.items()}
        both = gathered([(mine, problems)])
        names = sorted({name for rank, _ in both for name in rank})
        metrics = {name: _combine(name, [rank[name] for rank, _ in both if name in rank]) for name in names}
        return metrics, [problem for _, problems in both for problem in problems]


def _extreme(name: str) -> bool:
    return name.endswith(("_max", "_min"))


def _combine(name: str, values: list[float]) -> float:
    return extreme(name, values) if _extreme(name) else sum(values)
