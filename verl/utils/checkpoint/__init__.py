"""What every writer of checkpoints needs: folders that appear whole, errors that all ranks see, random states."""

from __future__ import annotations

import logging
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.errors import CheckpointError
from verl.utils.checkpoint.files import put_back, replace_folder

__all__ = ["LocalFolder", "on_all_ranks", "rng_state", "seed_everything", "set_rng_state"]

logger = logging.getLogger(__name__)


class LocalFolder:
    """A folder that all ranks write together, beside its place, and that is renamed when it is whole.

    Works on a file system that the nodes share, and where each node has its own.
    """

    def __init__(self, path: str | Path) -> None:
        self.final = Path(path).expanduser().absolute()
        self.partial = self.final.with_name(self.final.name + ".partial")

    def open(self) -> None:
        """Make the empty folder ``partial``; leftovers of a save that broke off go. Collective.

        Raises:
            CheckpointError: on every rank, if one cannot.
        """
        with on_all_ranks(f"write {self.final}"):
            if dist.get_rank() == 0:
                put_back(self.final)
                if self.partial.exists():
                    shutil.rmtree(self.partial)
        with on_all_ranks(f"write {self.final}"):
            self.partial.mkdir(parents=True, exist_ok=True)

    def commit(self) -> None:
        """Put ``partial`` in the place of ``final``. Collective.

        Raises:
            CheckpointError: on every rank, if one cannot.
        """
        with on_all_ranks(f"write {self.final}"):
            if dist.get_rank() == 0:
                replace_folder(self.partial, self.final)
        with on_all_ranks(f"write {self.final}"):
            if self.partial.exists():  # a node with a file system of its own
                try:
                    replace_folder(self.partial, self.final)
                except FileNotFoundError:
                    logger.debug("%s was renamed by another rank of this node", self.partial)


@contextmanager
def on_all_ranks(task: str) -> Iterator[None]:
    """Run the block on every rank; if it fails on one, raise on all, so that none waits for ever.

    The block must hold no collective operation.

    Raises:
        CheckpointError: naming the first rank that failed, and why.
    """
    try:
        yield
    finally:
        problem = sys.exc_info()[1]
        if problem is None or isinstance(problem, Exception):  # not on the way out of an interrupt
            _raise_first(task, problem)


def _raise_first(task: str, problem: Exception | None) -> None:
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if problem is None else str(problem) or type(problem).__name__)
    for rank, text in enumerate(texts):
        if text is not None:
            raise CheckpointError(f"cannot {task}: {text} (rank {rank})") from problem


def seed_everything(seed: int) -> None:
    """Seed every random generator of this process, those that user code may draw from too."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state() -> dict[str, Any]:
    """The state of every random generator of this process, as tensors and plain numbers."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``rng_state`` gave."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
