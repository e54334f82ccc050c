"""What the trainers share: steps until the last one, tracked and shown, saved and resumed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from verl.trainer.bad_steps import BadSteps
from verl.trainer.checkpoint import TrainerCheckpoint
from verl.trainer.pass_limits import PassLimits
from verl.trainer.recovery import Recovery
from verl.trainer.run_state import RunState
from verl.trainer.schedule import Schedule
from verl.trainer.termination import EXIT_CODE, StepInterrupted, Termination
from verl.trainer.timing import Stopwatch, stage
from verl.utils.checkpoint import rng_state, set_rng_state
from verl.utils.console import Progress
from verl.utils.dataset.loading import batches, load_position
from verl.utils.lock import FolderLock
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


class TrackerRuns:
    """What the services of the trackers call this run, for a later process to go on with; part of a checkpoint."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}

    def state_dict(self) -> dict[str, str]:
        """What a checkpoint has to hold."""
        return self.ids

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Go on from a checkpoint."""
        self.ids = dict(state)


class DecisiveSettings:
    """Settings that a run may be resumed with other values of, and is another run from there on; in a checkpoint."""

    NAMES = ("data.train_batch_size", "data.gen_batch_size", "data.seed", "actor_rollout_ref.rollout.n")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def read(self, description: Mapping[str, Any]) -> None:
        """Take the values of a whole configuration."""
        for name in self.NAMES:
            value: Any = description
            for key in name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            self.values[name] = value

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold."""
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Say what has changed since."""
        changed = [name for name, value in self.values.items() if name in state and state[name] != value]
        if changed:
            logger.warning(
                "the checkpoint was made with other settings: %s. The run goes on with the new ones.",
                ", ".join(f"{name}={state[name]}, now {self.values[name]}" for name in changed),
            )


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
        self.tracker_runs = TrackerRuns()
        self.settings = DecisiveSettings()
        self.controllers: dict[str, Any] = {
            "epochs": self.epochs,
            "bad_steps": self.bad_steps,
            "trackers": self.tracker_runs,
            "settings": self.settings,
        }
        """What changes from step to step, by name: each has ``state_dict`` (as JSON has it) and ``load_state_dict``."""
        self.recovery = Recovery(trainer.recovery, self)
        self.lock = FolderLock(trainer.default_local_dir)
        self.pass_limits = PassLimits(trainer.recovery.split_on_out_of_memory)
        self.stopwatch = Stopwatch()
        self.rows = self._epochs()
        self.termination = Termination()
        self._reported = 0

    def own_draws(self) -> torch.Generator:
        """For a data loader, which draws a number whenever it is gone through.

        From the process's generator it would move the random numbers of a resumed run, which goes through its first
        epoch twice.
        """
        return torch.Generator().manual_seed(0)

    def _one_step(self, rows: Mapping[str, Any]) -> Metrics:
        """Train on one batch of rows, then save and validate if they are due; the metrics of the step."""
        raise NotImplementedError(f"{type(self).__name__} must say what a step is.")

    def _epochs(self) -> Iterator[Mapping[str, Any]]:
        """Batches without end, epoch after epoch; a step may take more than one.

        Begins where the loader was resumed, maybe with an empty rest of an epoch.
        """
        while True:
            yield from batches(self.train_dataloader)
            self.epochs.epoch += 1

    def _train(self, trainer: BaseTrainerConfig, description: dict[str, Any]) -> None:
        """Train to the last step: resume, step, validate, save, log; go on when a process is lost.

        Args:
            trainer: the run's settings.
            description: the whole configuration, for the trackers.
        """
        self.settings.read(description)
        self.recovery.protect(self._resume)
        # From a folder that the user names a run may branch off; only one that goes on by itself is the same run.
        same = trainer.resume_mode == "auto"
        done, ids = (self.global_steps, self.tracker_runs.ids) if same else (0, {})
        with (
            closing(self.lock),
            self.termination,
            Tracking(trainer.project_name, trainer.experiment_name, trainer.logger, description, done, ids) as tracking,
            Progress(self.total_training_steps, self.global_steps, trainer.progress) as progress,
        ):
            self.tracker_runs.ids = tracking.run_ids
            try:
                self.recovery.protect(lambda: self._to_the_last_step(tracking, progress))
            except StepInterrupted:
                self.end_workers()
                self.recovery.save()
                raise SystemExit(EXIT_CODE) from None
            except Exception:
                self.checkpoint.rescue()
                raise

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
            self._stop_if_terminated()
            rows = next(self.rows)
            self.global_steps += 1
            with self.termination.interrupting(self.recovery.can_save):
                metrics = self._one_step(rows)
            self._report(
                metrics | self.checkpoint.metrics() | self.recovery.metrics() | self.pass_limits.metrics(),
                tracking,
                progress,
            )
            self.checkpoint.poll()
            self.bad_steps.stop_if_too_many(self.global_steps)
            self.recovery.hold()
        self.checkpoint.finish()

    def _stop_if_terminated(self) -> None:
        """Save and exit, if the machine is taken away."""
        if not self.termination.requested:
            return
        self._save_checkpoint()
        self.checkpoint.finish()
        logger.warning("Saved step %d of %d.", self.global_steps, self.total_training_steps)
        raise SystemExit(EXIT_CODE)

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
        load_position(self.train_dataloader, copy.deepcopy(state.dataloader))
        self.rows = self._epochs()
        for name, controller in self.controllers.items():
            if state.controllers.get(name) is not None:  # a run may switch a controller on between two checkpoints
                controller.load_state_dict(state.controllers[name])
        set_rng_state(state.rng)

    @stage("save_checkpoint")
    def _save_checkpoint(self) -> None:
        self.lock.acquire()  # a run that was not to save may have to, at SIGTERM
        self.checkpoint.save(self.state())

    def _save_if_due(self) -> None:
        """Save by the schedule, and after a step whose save has failed."""
        if self.checkpoint.owed or self.schedule.due("save", self.global_steps):
            self._save_checkpoint()
