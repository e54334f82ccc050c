"""Dealing out sequences so that every rank and every forward pass gets about equally many tokens.

Pure functions of lengths, and deterministic: the same lengths give the same parts everywhere, so
ranks need not talk to agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from verl.errors import ConfigError

Partitions = list[list[int]]
"""Positions in the list of lengths, by part; each part in ascending order."""


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> Partitions:
    """Split sequences into ``k_partitions`` parts of about equal token totals.

    By the largest differencing method (Karmarkar and Karp, 1982).

    Args:
        seqlen_list: tokens of each sequence.
        k_partitions: number of parts; none is empty.
        equal_size: every part gets the same number of sequences.

    Returns:
        for each part the positions of its sequences.

    Raises:
        ValueError: there are fewer sequences than parts, or they do not divide into equal ones.
    """
    total = len(seqlen_list)
    if not 1 <= k_partitions <= total:
        raise ValueError(f"{total} sequences cannot make {k_partitions} parts that all hold one.")
    if equal_size and total % k_partitions:
        raise ValueError(f"{total} sequences do not divide into {k_partitions} parts of equal size.")
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
    """Largest differencing: keep joining the two most uneven partial solutions, heavy parts onto light ones.

    A partial solution has ``k_partitions`` parts. With ``equal_size`` the first ones hold k
    sequences of similar length, one in each part; otherwise a single sequence and empty parts.
    """
    order = sorted(range(len(seqlen_list)), key=lambda i: (seqlen_list[i], i))
    step = k_partitions if equal_size else 1
    heap: list[tuple[int, int, list[_Part]]] = []
    for number, start in enumerate(range(0, len(order), step)):
        parts = [_Part(seqlen_list[i], [i]) for i in order[start : start + step]]
        parts += [_Part(0, []) for _ in range(k_partitions - len(parts))]
        heap.append(_entry(parts, number))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, heavy_first = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [a.join(b) for a, b in zip(heavy_first, reversed(other), strict=True)]
        heapq.heappush(heap, _entry(joined, number))
        number += 1
    return [sorted(part.members) for part in heap[0][2]]


def _entry(parts: list[_Part], number: int) -> tuple[int, int, list[_Part]]:
    """A heap entry: the most uneven solution first, then the oldest; parts from heavy to light, empty ones last."""
    parts = sorted(parts, key=_Part.weight, reverse=True)
    return parts[-1].tokens - parts[0].tokens, number, parts


def micro_batches_by_tokens(lengths: Sequence[int], max_tokens: int, min_count: int = 1) -> Partitions:
    """Pack sequences into as few parts as it finds of at most ``max_tokens`` tokens, of about equal totals.

    Args:
        lengths: tokens of each sequence.
        max_tokens: budget of a part.
        min_count: make at least this many parts (one sequence each, if there are no more sequences).

    Returns:
        parts from heavy to light, none empty: where memory does not suffice, the first part shows
        it, and parts of equal rank on different processes take about equally long.

    Raises:
        ConfigError: a single sequence is over the budget.
    """
    if not lengths:
        return []
    if max(lengths) > max_tokens:
        raise ConfigError(
            f"a sequence of {max(lengths)} tokens does not fit into a micro-batch of {max_tokens}. Raise "
            "ppo_max_token_len_per_gpu / log_prob_max_token_len_per_gpu / max_token_len_per_gpu to at least the "
            "prompt length plus the response length."
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
    """Longest first, each into the first part that has room."""
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
    """Tokens per part as the sequences came (contiguous parts) and as they were dealt.

    Returns:
        ``{prefix}/min``, ``max``, ``minmax_diff`` of contiguous parts, ``balanced_min``,
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
    """The permutation that undoes ``idx_map``: ``[idx_map[i] for i in get_reverse_idx(idx_map)]`` is sorted."""
    undo = [0] * len(idx_map)
    for position, sample in enumerate(idx_map):
        undo[sample] = position
    return undo
