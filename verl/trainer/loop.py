"""What the trainers share: steps until the last one, tracked and shown, saved and resumed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl.trainer.bad_steps import BadSteps
from verl.trainer.checkpoint import TrainerCheckpoint
from verl.trainer.run_state import RunState
from verl.trainer.schedule import Schedule
from verl.trainer.timing import Stopwatch, stage
from verl.utils.checkpoint import rng_state, set_rng_state
from verl.utils.console import Progress
from verl.utils.tracking import Tracking

if TYPE_CHECKING:
    from verl.trainer.config.trainer import BaseTrainerConfig

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
    schedule: Schedule

    def __init__(self, trainer: BaseTrainerConfig) -> None:
        self.global_steps = 0
        self.epochs = EpochCounter()
        self.bad_steps = BadSteps.of(trainer)
        self.controllers: dict[str, Any] = {"epochs": self.epochs, "bad_steps": self.bad_steps}
        """What changes from step to step, by name: each has ``state_dict`` (plain numbers) and ``load_state_dict``."""
        self.stopwatch = Stopwatch()
        self.rows = self._epochs()

    def _one_step(self, rows: Mapping[str, Any]) -> Metrics:
        """Train on one batch of rows, then save and validate if they are due; the metrics of the step."""
        raise NotImplementedError(f"{type(self).__name__} must say what a step is.")

    def _epochs(self) -> Iterator[Mapping[str, Any]]:
        """Batches without end, epoch after epoch; a step may take more than one.

        Begins where the loader was resumed, maybe with an empty rest of an epoch.
        """
        while True:
            yield from self.train_dataloader
            self.epochs.epoch += 1

    def _to_the_last_step(self, tracking: Tracking, progress: Progress) -> None:
        """From the step that was resumed to the last one."""
        while self.global_steps < self.total_training_steps:
            rows = next(self.rows)
            self.global_steps += 1
            metrics = self._one_step(rows) | self.checkpoint.metrics()
            tracking.log(metrics, step=self.global_steps)
            progress.update(self.global_steps, metrics)
            self.bad_steps.stop_if_too_many(self.global_steps)
        self.checkpoint.finish()

    def state(self) -> RunState:
        """The driver as it is now, between two steps."""
        return RunState(
            global_step=self.global_steps,
            dataloader=copy.deepcopy(self.train_dataloader.state_dict()),
            controllers={name: copy.deepcopy(part.state_dict()) for name, part in self.controllers.items()},
            rng=rng_state(),
        )

    def go_on_from(self, state: RunState) -> None:
        """Put the driver back to where it was after ``state.global_step`` steps."""
        self.global_steps = state.global_step
        self.train_dataloader.load_state_dict(copy.deepcopy(state.dataloader))
        self.rows = self._epochs()
        for name, controller in self.controllers.items():
            if state.controllers.get(name) is not None:  # a run may switch a controller on between two checkpoints
                controller.load_state_dict(state.controllers[name])
        set_rng_state(state.rng)

    @stage("save_checkpoint")
    def _save_checkpoint(self) -> None:
        self.checkpoint.save(self.state())

    def _save_if_due(self) -> None:
        """Save by the schedule, and after a step whose save has failed; see what became of a save in the background."""
        self.checkpoint.poll()
        if self.checkpoint.owed or self.schedule.due("save", self.global_steps):
            self._save_checkpoint()

    def _load_checkpoint(self) -> None:
        found = self.checkpoint.load()
        if found is not None:
            self.go_on_from(found)
            logger.info("resumed from step %d", found.global_step)
