"""Weights that arrive otherwise than they were sent."""

from __future__ import annotations

from collections.abc import Iterator

from verl.workers.rollout.weights import SharedPart


def damaged(parts: Iterator[SharedPart]) -> Iterator[SharedPart]:
    """Turn a bit of the last tensor of each part before the engine reads it."""
    for part in parts:
        data = bytearray(part.path.read_bytes())
        data[-1] ^= 1
        part.path.write_bytes(data)
        yield part
