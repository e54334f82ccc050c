"""The interface between a loss and the engine, and the reduction of metrics over a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.metric import extreme

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Denominators of a mini-batch over all ranks and micro-batches."""

    dp_size: int
    """Data-parallel ranks. A rank's loss is multiplied by it because gradients are averaged over them."""
    batch_num_tokens: int
    """Tokens with ``response_mask`` 1, at least 1."""
    global_batch_size: int
    """Sequences; if a trajectory may be several (``trajectory_count``), trajectories."""
    distilled_tokens: int = 0
    """Tokens with ``response_mask`` and ``distillation_mask`` 1, of a batch with both."""

    @classmethod
    def from_batch(
        cls, batch: DataProto, dp_size: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> BatchTotals:
        """Count the mini-batch of which ``batch`` is this rank's part. Collective over the data-parallel ``group``."""
        rows = int(batch.batch["trajectory_count"].sum()) if "trajectory_count" in batch.batch.keys() else len(batch)
        columns, distilled = batch.batch, 0
        if "distillation_mask" in columns.keys():
            distilled = int((columns["response_mask"] * columns["distillation_mask"]).sum())
        counts = torch.tensor([num_valid_tokens(batch), rows, distilled], dtype=torch.int64, device=device)
        dist.all_reduce(counts, group=group)
        tokens, sequences, distilled = counts.tolist()
        return cls(
            dp_size=dp_size,
            # Without a valid token on any rank a mean over tokens is 0, not 0 / 0.
            batch_num_tokens=max(tokens, 1),
            global_batch_size=sequences,
            distilled_tokens=distilled,
        )


@dataclass(frozen=True)
class PartialSum:
    """A metric that is this micro-batch's term of a sum over the mini-batch; the engine adds the terms unweighted."""

    value: Tensor | float


LossMetrics = Mapping[str, Tensor | float | PartialSum]
"""Metrics of one micro-batch. A plain number is the mean over its valid tokens, weighted by its share of the
mini-batch's valid tokens; names that end in ``_max`` or ``_min`` are reduced by max or min.
"""


@runtime_checkable
class LossFunction(Protocol):
    """A training loss, called by the engine for each micro-batch."""

    @property
    def outputs(self) -> frozenset[str]:
        """The model outputs that it reads: of ``log_probs``, ``entropy``; ``values``; ``scores``."""
        ...

    @property
    def rows_per_unit(self) -> int:
        """Number of rows whose losses depend on each other: 1, or 2 for pairs.

        That many consecutive rows, from the first of each rank's part, are always in one micro-batch and in order.
        """
        ...

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals, /
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss of one micro-batch, such that the sum over micro-batches is the loss of the mini-batch.

        Args:
            outputs: (bsz, response_length) each, zero where ``response_mask`` is 0.
            micro_batch: some rows of the mini-batch.
            totals: the denominators of the mini-batch.

        Returns:
            the loss, a scalar with the factor ``dp_size``; and metrics without it.
        """
        ...


LossCallable = Callable[[Mapping[str, Tensor], DataProto, BatchTotals], tuple[Tensor, LossMetrics]]
"""A plain function with the call of a :class:`LossFunction`; see :func:`as_loss_function`."""


@dataclass(frozen=True)
class FunctionLoss:
    """A plain function as a :class:`LossFunction`."""

    function: LossCallable
    outputs: frozenset[str] = frozenset({"log_probs"})
    rows_per_unit: int = 1

    def __call__(
        self, outputs: Mapping[str, Tensor], micro_batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, LossMetrics]:
        """Call the function; see :class:`LossFunction`."""
        return self.function(outputs, micro_batch, totals)


def as_loss_function(loss: LossFunction | LossCallable) -> LossFunction:
    """Wrap a plain function, which reads ``log_probs`` of single rows unless its attributes say otherwise.

    The attributes are those of :class:`LossFunction`; a loss that has both is returned as it is.
    """
    if isinstance(loss, LossFunction):
        return loss
    return FunctionLoss(loss, frozenset(getattr(loss, "outputs", {"log_probs"})), getattr(loss, "rows_per_unit", 1))


def num_valid_tokens(batch: DataProto) -> int:
    """Tokens with ``response_mask`` 1."""
    return int(batch.batch["response_mask"].sum())


def gathered(mine: list[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Concatenate the lists of the ranks of ``group``, in rank order; the same on every rank. Collective."""
    ranks: list[list[T] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    return [value for rank in ranks if rank is not None for value in rank]


class MetricSum:
    """Reduction of the metrics of micro-batches on all ranks to those of their mini-batch.

    A mean over the valid tokens of a micro-batch is weighted by that micro-batch's share of the mini-batch's
    valid tokens, so the result does not depend on micro-batches or ranks.
    """

    def __init__(self, totals: BatchTotals) -> None:
        self._tokens = totals.batch_num_tokens
        self._values: dict[str, list[tuple[float, Tensor | float]]] = {}

    def add(self, metrics: LossMetrics, num_tokens: int) -> None:
        """Add one micro-batch with ``num_tokens`` valid tokens."""
        for name, value in metrics.items():
            if isinstance(value, PartialSum):
                weight, value = 1.0, value.value
            elif num_tokens == 0:
                continue  # the mean over no token
            else:
                weight = 1.0 if is_extreme(name) else num_tokens / self._tokens
            self._values.setdefault(name, []).append((weight, value.detach() if isinstance(value, Tensor) else value))

    def reduce(self, problems: list[T], group: dist.ProcessGroup | None = None) -> tuple[dict[str, float], list[T]]:
        """Return the metrics of the mini-batch and all ranks' ``problems``, the same on every rank.

        Collective over the data-parallel ``group``, of which each rank has other rows.
        """
        numbers = iter(_read([value for parts in self._values.values() for _, value in parts]))
        mine = {name: _combine(name, [w * next(numbers) for w, _ in parts]) for name, parts in self._values.items()}
        # One collective for both: each costs a round trip per mini-batch.
        reports = gathered([(mine, problems)], group)
        # In one order on all ranks, although a rank of fillers alone reports no metrics.
        names = sorted({name for rank, _ in reports for name in rank})
        metrics = {name: _combine(name, [rank[name] for rank, _ in reports if name in rank]) for name in names}
        return metrics, [problem for _, problems in reports for problem in problems]


def _read(values: Sequence[Tensor | float]) -> list[float]:
    """Return numbers and scalar tensors as numbers, waiting once for all tensors of one device and format."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor):
            by_kind.setdefault((value.device, value.dtype), []).append(value.reshape(()))
    read = {kind: iter(torch.stack(tensors).tolist()) for kind, tensors in by_kind.items()}
    return [float(next(read[v.device, v.dtype]) if isinstance(v, Tensor) else v) for v in values]


def is_extreme(name: str) -> bool:
    """Return whether a metric is reduced by max or min."""
    return name.endswith(("_max", "_min"))


def _combine(name: str, values: list[float]) -> float:
    return extreme(name, values) if is_extreme(name) else sum(values)
