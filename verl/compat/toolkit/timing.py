"""Times of stages, here and over the ranks, and marks of stages in traces of profilers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from verl.utils.metric import simple_timer


@contextmanager
def marked_timer(
    name: str,
    timing_raw: dict[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """Add the seconds of the block to ``timing_raw[name]`` and mark the block in traces of profilers.

    The mark is a range of ``torch.profiler`` and, with a GPU, of NVTX. Neither has the colours, domains and categories
    that scripts may give.
    """
    with simple_timer(name, timing_raw), marked_range(name):
        yield


@contextmanager
def marked_range(name: str) -> Iterator[None]:
    """Mark the block in traces of ``torch.profiler`` and, with a GPU, of Nsight Systems."""
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


def gather_timing(timing_raw: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the values of all ranks for each name, in the order of the ranks. Collective.

    Every rank must have the same names.
    """
    names = list(timing_raw)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dict(timing_raw))
    for rank, rank_timing in enumerate(ranks):
        if rank_timing.keys() != timing_raw.keys():
            raise ValueError(
                f"rank {rank} timed {sorted(rank_timing)}, this rank {sorted(timing_raw)}; they must agree."
            )
    return {name: [rank_timing[name] for rank_timing in ranks] for name in names}


def reduce_timing(
    timing_raw: Mapping[str, float], reduce_op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG
) -> dict[str, float]:
    """Reduce each value over the ranks: mean (``AVG``), ``SUM``, ``MIN`` or ``MAX``. Collective."""
    # By gathered values, because gloo has no AVG.
    reduce = {
        dist.ReduceOp.AVG: lambda values: sum(values) / len(values),
        dist.ReduceOp.SUM: sum,
        dist.ReduceOp.MIN: min,
        dist.ReduceOp.MAX: max,
    }
    if reduce_op not in reduce:
        raise ValueError(f"times are reduced by AVG, SUM, MIN or MAX, not by {reduce_op}.")
    return {name: reduce[reduce_op](values) for name, values in gather_timing(timing_raw).items()}


def topk_reduce_ratio_min_max(timing: float, k: int = 10) -> tuple[float, float, float]:
    """Find stragglers: the share of ranks close to the slowest, the shortest and the longest time. Collective.

    Returns:
        the share of ranks whose time is at most ``k`` percent below the longest, the minimum, and the maximum.
    """
    times = gather_timing({"time": timing})["time"]
    shortest, longest = min(times), max(times)
    slow = sum(time >= longest * (1 - k / 100) for time in times)
    return slow / len(times), shortest, longest
