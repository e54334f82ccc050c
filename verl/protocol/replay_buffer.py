"""Trajectories kept for later steps, with age and priority."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.protocol.data_proto import DataProto

_ID, _STEP, _PRIORITY = "replay_id", "replay_step", "replay_priority"


class Replayed(NamedTuple):
    """Rows drawn from a :class:`ReplayBuffer`."""

    batch: DataProto
    """The rows, with the columns in which they were added."""
    ids: Tensor
    """(n,) int64 their numbers, for :meth:`ReplayBuffer.set_priorities`."""
    ages: Tensor
    """(n,) int64 steps since they were added."""


class ReplayBuffer:
    """Rows of batches, each with the step at which it was added and a priority.

    A row is drawn with a probability proportional to its priority to the power of ``alpha``
    (https://arxiv.org/abs/1511.05952). Beyond ``capacity`` the rows of the lowest priority are dropped, the oldest
    first among equals. A buffer that was saved and loaded draws the same rows as one that was not.

    Args:
        capacity: rows at most.
        max_age: rows added more than this many steps ago are dropped; None keeps them.
        alpha: 0 draws all rows alike.
        seed: of the draws.
    """

    def __init__(self, capacity: int, max_age: int | None = None, alpha: float = 1.0, seed: int = 0) -> None:
        if capacity < 1 or (max_age is not None and max_age < 0) or not 0 <= alpha < float("inf"):
            raise ValueError(
                f"a replay buffer needs capacity >= 1, max_age >= 0 or None, and alpha >= 0, got capacity={capacity}, "
                f"max_age={max_age}, alpha={alpha}."
            )
        self.capacity = capacity
        self.max_age = max_age
        self.alpha = alpha
        self._generator = torch.Generator().manual_seed(seed)
        self._added = 0
        self._rows: DataProto | None = None

    def __len__(self) -> int:
        return 0 if self._rows is None else len(self._rows)

    @property
    def ids(self) -> Tensor:
        """(len,) int64 number of each row, in the order in which they were added; never used again."""
        return self._own(_ID)

    @property
    def priorities(self) -> Tensor:
        """(len,) float64 priority of each row."""
        return self._own(_PRIORITY)

    def ages(self, step: int) -> Tensor:
        """Steps since each row was added, (len,) int64."""
        return step - self._own(_STEP)

    def _own(self, column: str) -> Tensor:
        if self._rows is None:
            return torch.zeros(0, dtype=torch.float64 if column == _PRIORITY else torch.int64)
        return self._rows.batch[column]

    def add(self, batch: DataProto, step: int, priorities: Tensor | Sequence[float] | None = None) -> Tensor:
        """Add all rows of ``batch`` and drop what is too old or too many; return the new rows' ids.

        Args:
            batch: on the CPU, with the same columns and widths as earlier ones; its ``meta_info`` is not kept.
            step: at which the rows were generated.
            priorities: (bsz,) at least 0; by default the highest in the buffer, or 1, so that new rows are drawn.

        Raises:
            SchemaError: the columns differ from earlier ones, or a priority is negative or not finite.
        """
        if priorities is None:
            highest = self.priorities.max().item() if len(self) else 1.0
            priorities = [highest] * len(batch)
        ids = torch.arange(self._added, self._added + len(batch))
        own = {
            _ID: ids,
            _STEP: torch.full((len(batch),), step),
            _PRIORITY: _checked(priorities, len(batch)),
        }
        rows = batch.select(meta_info_keys=[]) | DataProto.from_dict(own)
        # A copy, so that the buffer neither follows later writes into the batch nor keeps a whole step's memory.
        rows = rows.select_idxs(torch.arange(len(rows)))
        self._rows = rows if self._rows is None else DataProto.concat([self._rows, rows])
        self._added += len(batch)
        self.drop_old(step)
        excess = len(self) - self.capacity
        if excess > 0:  # a stable sort of rows that stand in the order of their ids: the oldest first among equals
            dropped = self.priorities.sort(stable=True).indices[:excess]
            self._keep(~torch.isin(torch.arange(len(self)), dropped))
        return ids

    def drop_old(self, step: int) -> int:
        """Drop rows that are older than ``max_age`` at ``step``; return how many."""
        if self.max_age is None or self._rows is None:
            return 0
        young = self.ages(step) <= self.max_age
        self._keep(young)
        return int((~young).sum())

    def _keep(self, mask: Tensor) -> None:
        if self._rows is not None and not mask.all():
            self._rows = self._rows.select_idxs(mask)

    def sample(self, size: int, step: int, replacement: bool = False) -> Replayed:
        """Draw ``size`` rows, after dropping those that are too old at ``step``.

        Args:
            size: number of rows.
            step: the present one.
            replacement: whether a row may be drawn more than once.

        Raises:
            ValueError: the buffer has fewer rows (with a priority above 0) than it needs.
        """
        self.drop_old(step)
        weights = self.priorities**self.alpha
        possible = int((weights > 0).sum())
        if size < 1 or possible < (1 if replacement else size):
            raise ValueError(f"{size} rows cannot be drawn from {possible} rows with a priority above 0.")
        drawn = torch.multinomial(weights, size, replacement, generator=self._generator)
        assert self._rows is not None
        rows = self._rows.select_idxs(drawn)
        ids, steps = rows.batch[_ID], rows.batch[_STEP]
        kept = [key for key in rows.batch.keys() if key not in (_ID, _STEP, _PRIORITY)]
        return Replayed(rows.select(batch_keys=kept), ids, step - steps)

    def set_priorities(self, ids: Tensor | Sequence[int], priorities: Tensor | Sequence[float]) -> None:
        """Change the priorities of rows; ids of rows that were dropped are ignored.

        Raises:
            SchemaError: a priority is negative or not finite, or an id was never given.
        """
        numbers = torch.as_tensor(ids, dtype=torch.int64)
        values = _checked(priorities, len(numbers))
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self._added:
            raise SchemaError(f"ids are 0 to {self._added - 1}, got {int(numbers.min())} to {int(numbers.max())}.")
        if self._rows is None:
            return
        places = torch.searchsorted(self.ids, numbers).clamp(max=len(self) - 1)
        there = self.ids[places] == numbers
        changed = self.priorities.clone()
        changed[places[there]] = values[there]
        self._rows.batch[_PRIORITY] = changed

    # ---- saving -------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything, the state of the draws too, to one file that holds no code."""
        rows = DataProto() if self._rows is None else self._rows
        settings = {
            "capacity": self.capacity,
            "max_age": self.max_age,
            "alpha": self.alpha,
            "added": self._added,
            "generator": self._generator.get_state(),
        }
        DataProto(rows.batch, rows.non_tensor_batch, {"replay_buffer": settings}).save_to_disk(path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ReplayBuffer:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: the file is damaged, or no batch.
            SchemaError: it is a batch, but no replay buffer.
        """
        rows = DataProto.load_from_disk(path)
        settings = rows.meta_info.pop("replay_buffer", None)
        if settings is None:
            raise SchemaError(f"{path} holds a batch and no replay buffer.")
        buffer = cls(settings["capacity"], settings["max_age"], settings["alpha"])
        buffer._generator.set_state(settings["generator"])
        buffer._added = settings["added"]
        buffer._rows = rows if _ID in rows.batch.keys() else None
        return buffer


def _checked(priorities: Tensor | Sequence[float], rows: int) -> Tensor:
    values = torch.as_tensor(priorities, dtype=torch.float64).cpu().reshape(-1)
    if len(values) != rows:
        raise SchemaError(f"{rows} rows need as many priorities, got {len(values)}.")
    if not (values.isfinite() & (values >= 0)).all():
        raise SchemaError("priorities are finite and at least 0.")
    return values
