"""What the trainers share: steps until the last one, tracked and shown, saved and resumed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from verl.trainer.checkpoint import TrainerCheckpoint
from verl.trainer.timing import Stopwatch, stage
from verl.utils.console import Progress
from verl.utils.tracking import Tracking

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


class EpochCounter:
    """How often the data has been gone through; part of a checkpoint."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.epoch = int(state["epoch"])


class TrainingLoop:
    """Base of the trainers; a subclass says what one batch of rows does (:meth:`_one_step`)."""

    train_dataloader: Any
    total_training_steps: int
    checkpoint: TrainerCheckpoint

    def __init__(self) -> None:
        self.global_steps = 0
        self.epochs = EpochCounter()
        self.stopwatch = Stopwatch()

    def _one_step(self, rows: Mapping[str, Any]) -> Metrics:
        """Train on one batch of rows, then save and validate if they are due; the metrics of the step."""
        raise NotImplementedError(f"{type(self).__name__} must say what a step is.")

    @cached_property
    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Batches without end, epoch after epoch; a step may take more than one."""
        return self._epochs()

    def _epochs(self) -> Iterator[Mapping[str, Any]]:
        """Begins where the loader was resumed, maybe with an empty rest of an epoch."""
        while True:
            yield from self.train_dataloader
            self.epochs.epoch += 1

    def _to_the_last_step(self, tracking: Tracking, progress: Progress) -> None:
        """From the step that was resumed to the last one."""
        while self.global_steps < self.total_training_steps:
            rows = next(self.rows)
            self.global_steps += 1
            metrics = self._one_step(rows)
            tracking.log(metrics, step=self.global_steps)
            progress.update(self.global_steps, metrics)

    @stage("save_checkpoint")
    def _save_checkpoint(self) -> None:
        self.checkpoint.save(self.global_steps, self.train_dataloader.state_dict())

    def _load_checkpoint(self) -> None:
        found = self.checkpoint.load()
        if found is not None:
            self.global_steps = found.global_step
            self.train_dataloader.load_state_dict(found.dataloader_state)
            logger.info("resumed from %s: step %d", found.folder, found.global_step)
