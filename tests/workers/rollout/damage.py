"""Weights that arrive otherwise than they were sent."""

from __future__ import annotations

import os
from collections.abc import Iterator

from verl.workers.rollout.weights import SharedPart


def damaged(parts: Iterator[SharedPart]) -> Iterator[SharedPart]:
    """Turn a bit of the last tensor of each part before the engine reads it."""
    for part in parts:
        turn_a_bit(part)
        yield part


def turn_a_bit(part: SharedPart) -> None:
    """Change a bit of the last tensor."""
    dtype, shape, start = list(part.tensors.values())[-1]
    with part.path.open("r+b") as file:
        file.seek(start + shape.numel() * dtype.itemsize - 1)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
