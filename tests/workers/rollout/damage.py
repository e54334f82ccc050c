"""Weights that arrive otherwise than they were sent, or by another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl.workers.rollout.weights import SharedPart


def damaged(parts: Iterator[SharedPart]) -> Iterator[SharedPart]:
    """Turn a bit of the last tensor of each part before the engine reads it."""
    for part in parts:
        turn_a_bit(part)
        yield part


def turn_a_bit(part: SharedPart) -> None:
    """Change a bit of the last tensor."""
    dtype, shape, start = list(part.tensors.values())[-1]
    part.memory[start + shape.numel() * dtype.itemsize - 1] ^= 1


@contextmanager
def handles_for_strangers() -> Iterator[None]:
    """Let a process that is no child of this one open the handles of shared memory."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
