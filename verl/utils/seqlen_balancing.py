"""Distribute sequences so that ranks and forward passes get about the same number of tokens.

The functions are deterministic, so ranks with the same lengths compute the same parts without communication.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verl.errors import ConfigError, SchemaError

Partitions = list[list[int]]  # for each part the indices of its sequences, in ascending order


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> Partitions:
    """Split sequences into ``k_partitions`` parts with about the same number of tokens.

    Uses the largest differencing method (Karmarkar and Karp, 1982).

    Args:
        seqlen_list: tokens of each sequence.
        k_partitions: number of parts; none is empty.
        equal_size: give every part the same number of sequences.

    Raises:
        ValueError: there are fewer sequences than parts, or ``equal_size`` is set and they do not divide evenly.
    """
    total = len(seqlen_list)
    if not 1 <= k_partitions <= total:
        raise SchemaError(f"{total} sequences cannot make {k_partitions} parts that all hold one.")
    if equal_size and total % k_partitions:
        raise SchemaError(f"{total} sequences do not divide into {k_partitions} parts of equal size.")
    return karmarkar_karp(seqlen_list, k_partitions, equal_size)


@dataclass
class _Part:
    tokens: int
    members: list[int]

    def weight(self) -> tuple[int, int]:
        return self.tokens, len(self.members)

    def join(self, other: _Part) -> _Part:
        small, large = sorted((self.members, other.members), key=len)
        large.extend(small)
        return _Part(self.tokens + other.tokens, large)


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> Partitions:
    """Largest differencing method: repeatedly join the two partial solutions with the largest difference of parts.

    Heavy parts are joined with light ones. A partial solution has ``k_partitions`` parts; initially, with
    ``equal_size``, one sequence of similar length in each part, otherwise one sequence and empty parts.
    """
    order = sorted(range(len(seqlen_list)), key=lambda i: (seqlen_list[i], i))
    step = k_partitions if equal_size else 1
    heap: list[tuple[int, int, list[_Part]]] = []
    for entry_index, start in enumerate(range(0, len(order), step)):
        parts = [_Part(seqlen_list[i], [i]) for i in order[start : start + step]]
        parts += [_Part(0, []) for _ in range(k_partitions - len(parts))]
        heap.append(_entry(parts, entry_index))
    heapq.heapify(heap)
    entry_index = len(heap)
    while len(heap) > 1:
        _, _, heavy_first = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [a.join(b) for a, b in zip(heavy_first, reversed(other), strict=True)]
        heapq.heappush(heap, _entry(joined, entry_index))
        entry_index += 1
    return [sorted(part.members) for part in heap[0][2]]


def _entry(parts: list[_Part], entry_index: int) -> tuple[int, int, list[_Part]]:
    """Create a heap entry that sorts by largest difference, then age; its parts go from heavy to light."""
    parts = sorted(parts, key=_Part.weight, reverse=True)
    return parts[-1].tokens - parts[0].tokens, entry_index, parts


def micro_batches_by_tokens(lengths: Sequence[int], max_tokens: int, min_count: int = 1) -> Partitions:
    """Pack sequences into few parts of at most ``max_tokens`` tokens, with about the same number of tokens each.

    The number of parts is found by a heuristic and need not be the minimum.

    Args:
        lengths: tokens of each sequence.
        max_tokens: limit for a part.
        min_count: minimum number of parts, as far as there are sequences.

    Returns:
        non-empty parts from heavy to light, so that the first one shows whether memory suffices, and the n-th parts on
        different ranks take about the same time.

    Raises:
        ConfigError: a single sequence exceeds the limit.
    """
    if not lengths:
        return []
    if max(lengths) > max_tokens:
        raise ConfigError(
            f"a sequence of {max(lengths)} tokens does not fit into a micro-batch of {max_tokens}. Raise "
            "max_token_len (of a run ppo_max_token_len_per_gpu, log_prob_max_token_len_per_gpu or "
            "max_token_len_per_gpu) to at least the prompt length plus the response length."
        )
    packed = _first_fit(lengths, max_tokens)
    crowded = sum(length > max_tokens // 2 for length in lengths)  # no two of these share a part
    fewest = min(max(-(-sum(lengths) // max_tokens), crowded, min_count, 1), len(lengths))
    most = min(max(len(packed), fewest), len(lengths))
    best = _split_until(packed, most)
    while fewest <= most:  # the fewest balanced parts that keep the budget, by bisection
        count = (fewest + most) // 2
        parts = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
        if max(_tokens(lengths, part) for part in parts) <= max_tokens:
            best, most = parts, count - 1
        else:
            fewest = count + 1
    return sorted(best, key=lambda part: (-_tokens(lengths, part), part))


def _first_fit(lengths: Sequence[int], max_tokens: int) -> Partitions:
    """First-fit decreasing: put each sequence, longest first, into the first part with enough room."""
    parts: Partitions = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = next((n for n, free in enumerate(room) if lengths[i] <= free), len(parts))
        if at == len(parts):
            parts.append([])
            room.append(max_tokens)
        parts[at].append(i)
        room[at] -= lengths[i]
    return [sorted(part) for part in parts]


def _split_until(parts: Partitions, count: int) -> Partitions:
    """Halve the part with the most members until there are ``count`` parts."""
    parts = [list(part) for part in parts]
    while len(parts) < count:
        largest = parts.pop(max(range(len(parts)), key=lambda n: len(parts[n])))
        half = len(largest) // 2
        parts += [largest[:half], largest[half:]]
    return parts


def _tokens(lengths: Sequence[int], part: list[int]) -> int:
    return sum(lengths[i] for i in part)


def log_seqlen_unbalance(seqlen_list: Sequence[int], partitions: Partitions, prefix: str) -> dict[str, float]:
    """Metrics of the tokens per part without and with balancing.

    Returns:
        ``{prefix}/min``, ``max``, ``minmax_diff`` of contiguous parts in the original order, ``balanced_min`` and
        ``balanced_max`` of ``partitions``, and ``mean``.
    """
    share = -(-len(seqlen_list) // len(partitions))
    plain = [sum(seqlen_list[start : start + share]) for start in range(0, len(seqlen_list), share)]
    dealt = [_tokens(seqlen_list, part) for part in partitions]
    return {
        f"{prefix}/min": min(plain),
        f"{prefix}/max": max(plain),
        f"{prefix}/minmax_diff": max(plain) - min(plain),
        f"{prefix}/balanced_min": min(dealt),
        f"{prefix}/balanced_max": max(dealt),
        f"{prefix}/mean": sum(dealt) / len(partitions),
    }


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Return the inverse permutation: ``[idx_map[i] for i in get_reverse_idx(idx_map)]`` is sorted."""
    undo = [0] * len(idx_map)
    for position, sample in enumerate(idx_map):
        undo[sample] = position
    return undo


def ceildiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


def calculate_workload(seqlen_list: Tensor) -> Tensor:
    """Estimate the relative cost of a forward pass over each sequence: 24576·n + n² for n tokens.

    Linear layers cost 24·h² per token and attention 4·h·n, here with the hidden size h = 4096 of a model of 7B
    parameters: 24·h²·n + 4·h·n² = 4·h·(24576·n + n²).
    """
    return 24576 * seqlen_list + seqlen_list**2


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Hashable], k_partitions: int
) -> Partitions:
    """Split sequences into parts of about the same cost, with all sequences of one ``uid`` in the same part.

    Raises:
        ValueError: there are fewer uids than parts, or the lists differ in length.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (_, uid) in enumerate(zip(seqlen_list, uid_list, strict=True)):
        groups.setdefault(uid, []).append(i)
    costs = calculate_workload(torch.as_tensor(list(seqlen_list))).tolist()
    members = list(groups.values())
    parts = get_seqlen_balanced_partitions([sum(costs[i] for i in group) for group in members], k_partitions, False)
    return [sorted(i for group_index in part for i in members[group_index]) for part in parts]


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[TensorDict], Partitions]:
    """Split a batch into micro-batches of at most ``max_token_len`` tokens, see :func:`micro_batches_by_tokens`.

    Args:
        batch: with attention_mask (bsz, sequence_length), or else input_ids as a nested tensor.
        max_token_len: most tokens of a micro-batch.
        dp_group: data-parallel ranks, which all call this.
        num_batches_divided_by: the number of micro-batches is a multiple of this.
        same_micro_num_in_dp: give all ranks of ``dp_group`` the same number of micro-batches.
        min_num_micro_batch: smallest number of micro-batches.
        use_dynamic_bsz_balance: order them from heavy to light; else by their first row.
        force_group_size: so many consecutive rows stay together.

    Returns:
        the micro-batches, and the rows of each.

    Raises:
        ConfigError: one row, or one group of rows, exceeds the limit.
        ValueError: there are too few rows for the number of micro-batches, or they do not divide into groups.
    """
    parts = _micro_batch_rows(
        _row_lengths(batch),
        max_token_len,
        dp_group if same_micro_num_in_dp else None,
        num_batches_divided_by or 1,
        min_num_micro_batch or 1,
        force_group_size,
    )
    if not use_dynamic_bsz_balance:
        parts = sorted(parts)
    return [batch[torch.tensor(part)] for part in parts], parts


def _row_lengths(batch: TensorDict) -> list[int]:
    if "attention_mask" in batch.keys():
        return batch["attention_mask"].sum(-1).long().tolist()
    return batch["input_ids"].offsets().diff().tolist()


def _micro_batch_rows(
    lengths: list[int], max_tokens: int, group: dist.ProcessGroup | None, multiple: int, least: int, together: int
) -> Partitions:
    if len(lengths) % together:
        raise ValueError(f"{len(lengths)} rows do not divide into groups of {together} (force_group_size).")
    sums = [sum(lengths[start : start + together]) for start in range(0, len(lengths), together)]
    count = 0
    needed = -(-least // multiple) * multiple
    while needed != count:  # a larger number may need more parts again, here or on another rank
        count = needed
        parts = micro_batches_by_tokens(sums, max_tokens, count)
        needed = _largest(max(count, -(-len(parts) // multiple) * multiple), group)
    if len(parts) != count:
        raise ValueError(f"{len(sums)} rows or groups of rows cannot make {count} micro-batches.")
    return [[first * together + i for first in part for i in range(together)] for part in parts]


def _largest(count: int, group: dist.ProcessGroup | None) -> int:
    """Return the largest count of the ranks of a group."""
    if group is None:
        return count
    largest = torch.tensor(count, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)


class _Rows(Protocol):
    """Methods of ``DataProto`` that :func:`prepare_dynamic_batch` uses; that class is in a layer above this module."""

    batch: Any

    def select_idxs(self, idxs: object) -> Self: ...


D = TypeVar("D", bound=_Rows)


def prepare_dynamic_batch(
    data: D,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[D], Partitions]:
    """Split a ``DataProto`` as :func:`rearrange_micro_batches` splits its tensors; all its columns are split."""
    _, parts = rearrange_micro_batches(
        data.batch,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    return [data.select_idxs(part) for part in parts], parts


def restore_dynamic_batch(data: Tensor, batch_idx_list: Partitions) -> Tensor:
    """Put the rows of concatenated micro-batches back into the order of the batch that was split.

    ``data`` may be a nested tensor; ``batch_idx_list`` holds the rows of each micro-batch.
    """
    order = get_reverse_idx(list(itertools.chain.from_iterable(batch_idx_list)))
    if data.is_nested:
        rows = data.unbind()
        return torch.nested.as_nested_tensor([rows[i] for i in order], layout=data.layout)
    return data[order]
