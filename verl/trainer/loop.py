"""What the trainers share: steps until the last one, tracked and shown, saved and resumed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl.trainer.bad_steps import BadSteps
from verl.trainer.checkpoint import TrainerCheckpoint
from verl.trainer.recovery import Recovery
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
        self.recovery = Recovery(trainer.recovery, self)
        self.stopwatch = Stopwatch()
        self.rows = self._epochs()
        self._reported = 0

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

    def _train(self, trainer: BaseTrainerConfig, description: dict[str, Any]) -> None:
        """Train to the last step: resume, step, validate, save, log; go on when a process is lost.

        Args:
            trainer: the run's settings.
            description: the whole configuration, for the trackers.
        """
        self.recovery.protect(self._resume)
        with (
            Tracking(trainer.project_name, trainer.experiment_name, trainer.logger, description) as tracking,
            Progress(self.total_training_steps, self.global_steps, trainer.progress) as progress,
        ):
            self.recovery.protect(lambda: self._to_the_last_step(tracking, progress))

    def start_workers(self) -> None:
        """Start all workers of the run and load their models."""
        raise NotImplementedError(f"{type(self).__name__} must say how its workers start.")

    def end_workers(self) -> None:
        """End all workers, and give their places back; they can be started again."""
        raise NotImplementedError(f"{type(self).__name__} must say how its workers end.")

    def restart_workers(self) -> None:
        """End all workers and start new ones."""
        self.end_workers()
        self.start_workers()

    def _resume(self) -> None:
        found = self.checkpoint.load()
        if found is not None:
            self.go_on_from(found)
            logger.info("resumed from step %d", found.global_step)

    def _to_the_last_step(self, tracking: Tracking, progress: Progress) -> None:
        """From the step that the run is at to the last one."""
        self.recovery.hold()
        while self.global_steps < self.total_training_steps:
            rows = next(self.rows)
            self.global_steps += 1
            metrics = self._one_step(rows)
            self._report(metrics | self.checkpoint.metrics() | self.recovery.metrics(), tracking, progress)
            self.bad_steps.stop_if_too_many(self.global_steps)
            self.recovery.hold()
        self.checkpoint.finish()

    def _report(self, metrics: Metrics, tracking: Tracking, progress: Progress) -> None:
        if self.global_steps <= self._reported:  # done again after a loss
            return
        tracking.log(metrics, step=self.global_steps)
        progress.update(self.global_steps, metrics)
        self._reported = self.global_steps

    # ---- states ---------------------------------------------------------------------------------

    @property
    def trained_groups(self) -> dict[str, Any]:
        """The worker groups that hold training state, by the sub-folder of a checkpoint that each writes."""
        raise NotImplementedError(f"{type(self).__name__} must say which workers it trains.")

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
