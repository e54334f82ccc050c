"""The training loop of all trainers: steps, validation, metrics, checkpoints and resumption."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from omegaconf import OmegaConf

from verl.base.import_utils import user_code
from verl.base.redact import without_secrets
from verl.base.types import Stateful
from verl.checkpoint.resume import CheckpointPlan
from verl.checkpoint.run import TrainerCheckpoint
from verl.checkpoint.states import RunState, rng_state, set_rng_state
from verl.checkpoint.steps import saved_steps, step_folder
from verl.datasets.loading import batches, load_position, skip_batches
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.supervision.lock import FolderLock
from verl.supervision.termination import EXIT_CODE, StepInterrupted, Termination, unwrapped
from verl.tracking import Tracking
from verl.trainer.checkpoint_callback import SETTING, build_checkpoint_callback
from verl.trainer.health import HealthWatch
from verl.trainer.recovery import BadSteps, PassLimits, Recovery
from verl.trainer.worker_groups import WorkerGroups
from verl.utils.console import Progress, status
from verl.utils.deferred import Deferred
from verl.utils.metric import Metrics
from verl.utils.run_log import rank_columns
from verl.utils.step_context import StepContext

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from verl.config import BaseTrainerConfig, PPOConfig, SupervisedConfig
    from verl.single_controller.base.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """Events that happen every ``frequency`` steps and at the last step; a frequency ≤ 0 turns that off."""

    total_steps: int
    frequencies: dict[str, int] = field(default_factory=dict)
    at_end: frozenset[str] = frozenset()
    """Events that happen at the last step whatever their frequency."""

    @classmethod
    def from_config(cls, trainer: BaseTrainerConfig, total_steps: int) -> Schedule:
        """Read ``trainer.save_freq`` (if the run saves) and ``test_freq`` as the events ``save`` and ``test``."""
        at_end, save_freq = (frozenset({"save"}), trainer.save_freq) if trainer.saves else (frozenset(), -1)
        return cls(total_steps, {"save": save_freq, "test": trainer.test_freq}, at_end)

    def due(self, event: str, step: int) -> bool:
        """Return whether ``event`` happens after ``step`` (counted from 1)."""
        frequency, is_last = self.frequencies[event], step == self.total_steps
        return (is_last and event in self.at_end) or (frequency > 0 and (is_last or step % frequency == 0))


class EpochCounter:
    """Number of completed passes over the data; part of a checkpoint."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.epoch = int(state["epoch"])


class TrackerRuns:
    """The run's ids at the tracking services, so that a resumed run continues the same curves; part of a checkpoint."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}

    def state_dict(self) -> dict[str, str]:
        """The state for a checkpoint."""
        return self.ids

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Restore the state of a checkpoint."""
        self.ids = dict(state)


class RunSettings:
    """The settings of a run, by dotted name and without secrets; part of a checkpoint.

    On resumption the current settings hold. Those that differ from the checkpoint's are logged once.
    """

    NOT_COMPARED = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.logger", "trainer.progress")
    """Settings that say how to resume or what to show."""
    CHECKPOINT_KEYS = ("model.path",)
    """Endings of settings that have no effect after a checkpoint is loaded."""
    SHOWN = 40

    def __init__(self, description: Mapping[str, object]) -> None:
        plain = json.loads(json.dumps(without_secrets(description)))  # tuples become lists, as in a checkpoint
        self.values: dict[str, object] = dict(_leaves("", plain))

    def state_dict(self) -> dict[str, object]:
        """The state for a checkpoint."""
        return self.values

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Log the settings that differ from the checkpoint's; the current ones are kept."""
        names = (name for name in sorted(state.keys() & self.values.keys()) if name not in self.NOT_COMPARED)
        changed = [self._difference(name, state[name]) for name in names if state[name] != self.values[name]]
        if changed:
            rest = [f"and {len(changed) - self.SHOWN} more"] if len(changed) > self.SHOWN else []
            logger.warning(
                "The checkpoint was made with other settings. This run uses those of its command:\n  %s",
                "\n  ".join(changed[: self.SHOWN] + rest),
            )

    def _difference(self, name: str, before: object) -> str:
        text = f"{name}: {before} in the checkpoint, {self.values[name]} now"
        is_loaded = name.endswith(self.CHECKPOINT_KEYS) and not name.startswith("reward_model")
        return f"{text} (the weights that are trained are the checkpoint's all the same)" if is_loaded else text


def _leaves(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _leaves(f"{prefix}.{key}" if prefix else key, inner)


class TrainingLoop:
    """Base class of the trainers; a subclass defines the step and starts the workers."""

    train_dataloader: StatefulDataLoader
    total_training_steps: int
    schedule: Schedule
    context_class: ClassVar[type[StepContext]] = StepContext
    observe_stage: Callable[[str], AbstractContextManager[object]] = nullcontext
    """See :attr:`StepContext.observe`."""

    def __init__(self, config: PPOConfig | SupervisedConfig, plan: CheckpointPlan, worker_groups: WorkerGroups) -> None:
        self.typed_config: Any = config
        self.worker_groups = worker_groups
        trainer = config.trainer
        self.global_steps = 0
        self.epochs = EpochCounter()
        self.bad_steps = BadSteps.from_config(trainer)
        self.tracker_runs = TrackerRuns()
        self.settings = RunSettings(config.to_dict())
        self.controllers: dict[str, Stateful] = {
            "epochs": self.epochs,
            "bad_steps": self.bad_steps,
            "trackers": self.tracker_runs,
            "settings": self.settings,
        }
        """The driver's state in a checkpoint, by name: objects with ``state_dict`` (JSON) and ``load_state_dict``."""
        self.lock = FolderLock(trainer.default_local_dir)
        self.checkpoint = TrainerCheckpoint(plan, {})
        self.pass_limits = PassLimits(trainer.recovery.split_on_out_of_memory)
        self.termination = Termination()
        self.recovery = Recovery(trainer.recovery, self, self.checkpoint, self.pass_limits, self.termination)
        self.rows = self._epochs()
        self.health = HealthWatch()
        self.checkpoint_callback = build_checkpoint_callback(OmegaConf.create(config.to_dict()))
        self._reported_step = 0
        self._shown_save: int | None = None

    # ---- what a subclass defines ----------------------------------------------------------------

    @property
    def trained_groups(self) -> Mapping[str, WorkerGroup]:
        """Worker groups with training state, by the checkpoint sub-folder that each writes."""
        raise NotImplementedError(f"{type(self).__name__} must say which workers it trains.")

    @property
    def has_workers(self) -> bool:
        """True if the workers run."""
        return bool(self.worker_groups.groups)

    @property
    def busy_role(self) -> Hashable:
        """The role whose workers are at work between two steps; None for none."""
        return None

    def start_workers(self) -> None:
        """Start all workers of the run and load their models."""
        raise NotImplementedError(f"{type(self).__name__} must say how its workers start.")

    def to_batch(self, rows: Mapping[str, object]) -> DataProto:
        """Convert collated rows of the data set to the batch of a step."""
        raise NotImplementedError(f"{type(self).__name__} must say what a batch looks like.")

    def step(self, context: StepContext) -> DataProto:
        """Train on the next batch, add metrics and times to ``context``, and return the batch with its new columns."""
        raise NotImplementedError(f"{type(self).__name__} must say what a step is.")

    def step_metrics(self, batch: DataProto, context: StepContext) -> Metrics:
        """Metrics of a finished step, from the batch that :meth:`step` returned and the times of its stages."""
        raise NotImplementedError(f"{type(self).__name__} must say what is measured in a step.")

    @property
    def validates(self) -> bool:
        """True if the run can validate."""
        raise NotImplementedError(f"{type(self).__name__} must say whether it validates.")

    def _validate(self) -> Metrics:
        """Compute metrics over the whole validation set."""
        raise NotImplementedError(f"{type(self).__name__} must say how it validates.")

    def _before_first_step(self, tracking: Tracking) -> None:
        """Called once per process, before the first step of a new or resumed run."""

    def new_context(self) -> StepContext:
        """Make the context of step ``global_steps``."""
        return self.context_class(self.global_steps, observe=self.observe_stage)

    def observed(self, context: StepContext) -> AbstractContextManager[None]:
        """Return a context entered around each step, such as a profiler; for subclasses to override."""
        return nullcontext()

    # ---- the run --------------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Start all workers and load their models, unless they run already."""
        with self.recovery.guard():
            if not self.has_workers:
                self.start_workers()

    def fit(self) -> None:
        """Train to the last step: resume, step, validate, save, log; restart the workers when a process is lost.

        Raises:
            SystemExit: with :data:`EXIT_CODE`, after SIGTERM and once the state is saved.
            ProcessLostError: processes were lost more often in a row than ``trainer.recovery.max_restarts``.
            NonFiniteError: the updates of ``trainer.recovery.max_bad_steps`` steps in a row were not finite.
        """
        if not self.has_workers:
            self.init_workers()
        with self.recovery.guard():
            self.resume()
        with self._reporting() as (tracking, progress):
            has_begun = False
            first = self.global_steps
            while True:
                with self.recovery.guard():
                    self.recovery.snapshot()
                    if not has_begun:
                        self._before_first_step(tracking)
                        has_begun = True
                        if not self._is_over():
                            status(f"training from step {first + 1} to {self.total_training_steps}")
                    if self._is_over():
                        self.checkpoint.finish()
                        self._show_saved(tracking)
                        self._show_end(first)
                        return
                    context = self._next_step()
                    with (
                        self.observed(context),
                        context.stage("step"),
                        self.termination.interrupting(self.recovery.can_save),
                    ):
                        batch = self.step(context)
                        self._validate_and_save(context)
                    self._report(self._all_metrics(batch, context), context, tracking, progress)
                    self.checkpoint.poll()
                    self._show_saved(tracking)
                    self.bad_steps.stop_if_too_many(context.number)

    def shutdown(self) -> None:
        """End the workers after the run; the trainer cannot be used afterwards."""
        self.end_workers()

    def end_workers(self) -> None:
        """End all workers and release their pools; they can be started again."""
        self.worker_groups.end()

    def restart_workers(self) -> None:
        """End all workers and start new ones."""
        self.end_workers()
        self.start_workers()

    def restart_rollout_pool(self) -> bool:
        """See :meth:`RecoverableRun.restart_rollout_pool`; a trainer without such a pool has nothing to start."""
        return False

    def resume(self) -> None:
        """Load the checkpoint that ``trainer.resume_mode`` selects, if there is one."""
        state = self.checkpoint.load()
        if state is not None:
            self.restore(state)
            status(f"resumed from step {state.global_step} in {self.checkpoint.root}")

    @contextmanager
    def _reporting(self) -> Iterator[tuple[Tracking, Progress]]:
        """Open trackers and progress display, handle SIGTERM; after an error, finish the checkpoint in progress."""
        trainer = self.typed_config.trainer
        # A run resumed from a folder that the user names may be a branch, so only `auto` continues the same curves.
        same = trainer.resume_mode == "auto"
        done, ids = (self.global_steps, self.tracker_runs.ids) if same else (0, {})
        description = self.typed_config.to_dict()
        with (
            closing(self.lock),
            self.termination,
            Tracking(trainer.project_name, trainer.experiment_name, trainer.logger, description, done, ids) as tracking,
            Progress(self.total_training_steps, self.global_steps, trainer.progress) as progress,
        ):
            self.tracker_runs.ids = tracking.run_ids
            try:
                with unwrapped():
                    yield tracking, progress
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(self._resume_hint())
                raise
            except StepInterrupted:
                self.end_workers()
                self._log_saved(self.recovery.save())
                raise SystemExit(EXIT_CODE) from None
            except Exception:  # raised again below; an interrupt must not wait for the save in progress
                self.checkpoint.rescue()
                raise

    def _show_saved(self, tracking: Tracking) -> None:
        """Say, and record, which step was saved since the last call, if any."""
        step = self.checkpoint.last_saved
        if step is not None and step != self._shown_save:
            status(f"saved step {step} to {self.checkpoint.root}")
            tracking.log_event("checkpoint", step=step, folder=str(self.checkpoint.root))
            if self.typed_config.trainer.log_checkpoints:
                tracking.log_checkpoint(step, step_folder(self.checkpoint.root, step))
            self._call_back(step)
        self._shown_save = step

    def _call_back(self, step: int) -> None:
        """Run the user's callback for a step that is saved."""
        folder = str(step_folder(self.checkpoint.root, step))
        with user_code(f"{SETTING}: on_save of step {step} failed"):
            self.checkpoint_callback.on_save(trainer=self, global_step=step, checkpoint_dir=folder, async_save=False)

    def _show_end(self, first: int) -> None:
        trainer, done = self.typed_config.trainer, self.global_steps - first
        if done:
            status(f"finished: {done} step{'s' * (done != 1)}, up to step {self.global_steps}")
        elif not getattr(trainer, "val_only", False):
            status(
                f"this run had finished: step {self.global_steps} is saved in {self.checkpoint.root}, and nothing is "
                f"left of {self.total_training_steps} steps. For more steps raise trainer.total_training_steps "
                "or trainer.total_epochs; to train anew set another trainer.experiment_name (or "
                "trainer.default_local_dir; in a call of Python output_dir), or trainer.resume_mode=disable."
            )

    def _resume_hint(self) -> str:
        """Sentences for a run that was interrupted: where it was, and how it goes on."""
        trainer = self.typed_config.trainer
        saved = list(saved_steps(Path(trainer.default_local_dir).expanduser()).values())
        where = f"The run was at step {self.global_steps} of {self.total_training_steps}."
        if not saved:
            return f"{where} There is no checkpoint yet (trainer.save_freq): the same command begins anew."
        with_auto = "" if trainer.resume_mode == "auto" else " with trainer.resume_mode=auto"
        return f"{where} The last checkpoint is {saved[-1]}: the same command{with_auto} goes on from there."

    def _is_over(self) -> bool:
        return self.global_steps >= self.total_training_steps

    def _next_step(self) -> StepContext:
        """The context of the next step; after SIGTERM, save and exit instead."""
        if self.termination.requested:
            with self.new_context().stage("save_checkpoint"):
                self._save_checkpoint()
            self._log_saved(self.global_steps)
            raise SystemExit(EXIT_CODE)
        self.global_steps += 1
        return self.new_context()

    def next_batch(self) -> DataProto:
        """Take the next batch from the data."""
        return self.to_batch(next(self.rows))

    def _log_saved(self, step: int) -> None:
        """Say which step was saved before the run exits."""
        logger.warning("Saved step %d of %d.", step, self.total_training_steps)
        if step != self._shown_save:
            self._call_back(step)

    def _validate_and_save(self, context: StepContext) -> None:
        """Validate and save when they are due; after a failed save, try again at the next step."""
        if self.validates and self.schedule.due("test", context.number):
            with context.stage("testing"):
                context.metrics |= self._validate()
        if self.checkpoint.owed or self.schedule.due("save", context.number):
            with context.stage("save_checkpoint"):
                self._begin_save()

    def _all_metrics(self, batch: DataProto, context: StepContext) -> Metrics:
        metrics = context.metrics | self.step_metrics(batch, context)
        return metrics | self.checkpoint.metrics() | self.recovery.metrics() | self.pass_limits.metrics()

    def _keep_expert_counts(self, updated: DataProto, context: StepContext) -> None:
        """Make a table of the tokens that each expert got in an update, where that is asked for."""
        if not self.typed_config.trainer.log_expert_counts:
            return
        counts = updated.meta_info.get("expert_counts")
        if counts is None:
            raise ConfigError(
                "trainer.log_expert_counts=true: the routers of the model do not return what they choose. Set it false."
            )
        columns = ["layer", *(f"expert {index}" for index in range(len(counts[0])))]
        context.tables["moe/tokens_per_expert"] = columns, [[layer, *row] for layer, row in enumerate(counts)]

    def _report(self, metrics: Metrics, context: StepContext, tracking: Tracking, progress: Progress) -> None:
        if self.global_steps <= self._reported_step:  # a step repeated after a restart is logged once only
            return
        calls = self.worker_groups.call_times(self.busy_role) if tracking.keeps_events else {}
        progress.update(self.global_steps, metrics)
        tracking.log(metrics, step=self.global_steps)
        for name, (columns, rows) in context.tables.items():
            tracking.log_table(name, columns, rows, self.global_steps)
        tracking.log_event("step", step=self.global_steps, spans=context.spans)
        if calls:
            tracking.log_event("ranks", step=self.global_steps, **rank_columns(calls))
        for alert in self.health.check(self.global_steps, metrics):
            logger.warning("step %d: %s", alert.step, alert.reason)
            tracking.log_alert(alert.step, alert.rule, alert.reason)
        self._reported_step = self.global_steps

    # ---- states ---------------------------------------------------------------------------------

    def loader_generator(self) -> torch.Generator:
        """Create a separate random generator for a data loader.

        A loader draws a number at each iteration over it. From the process's generator that would shift the random
        numbers of a resumed run, which starts its first epoch twice.
        """
        return torch.Generator().manual_seed(0)

    def _epochs(self) -> Iterator[Mapping[str, object]]:
        """Iterate over the data without end, from the position of the loader; the rest of an epoch may be empty."""
        while True:
            yield from batches(self.train_dataloader)
            self.epochs.epoch += 1

    def state(self) -> RunState:
        """The driver's state between two steps: step, data position, controllers, random generators."""
        return RunState(
            global_step=self.global_steps,
            dataloader=copy.deepcopy(self.train_dataloader.state_dict()),
            controllers={name: copy.deepcopy(dict(part.state_dict())) for name, part in self.controllers.items()},
            rng=rng_state(),
            pending=self.pending(),
        )

    def pending(self) -> Deferred[Mapping[str, DataProto]]:
        """Return batches that were sampled and not trained on yet; subclasses that sample ahead override the pair."""
        return Deferred.from_value({})

    def load_pending(self, batches: Mapping[str, DataProto]) -> None:
        """Restore the batches that :meth:`pending` returned."""

    def restore(self, state: RunState) -> None:
        """Restore the driver to ``state``."""
        self.global_steps = state.global_step
        if state.dataloader is None:
            self.epochs.epoch = skip_batches(self.train_dataloader, state.global_step)
        else:
            load_position(self.train_dataloader, copy.deepcopy(state.dataloader))
        self.rows = self._epochs()
        for name, controller in self.controllers.items():
            saved = state.controllers.get(name)
            if saved is not None:  # the checkpoint may be older than a controller's activation
                controller.load_state_dict(saved)
        pending = state.pending.result()
        self.load_pending(
            {
                name: DataProto.load_from_disk(batch) if isinstance(batch, Path) else cast("DataProto", batch)
                for name, batch in pending.items()
            }
        )
        if state.rng is not None:
            set_rng_state(state.rng)

    def _save_checkpoint(self) -> None:
        """Save the state after ``global_steps`` and wait until it is complete: a run can then resume from it."""
        self._begin_save()
        self.checkpoint.finish()

    def _begin_save(self) -> None:
        """Start a save, which ``checkpoint.poll`` completes once the trackers have the step."""
        self.lock.acquire()  # with save_freq=-1 the folder is not locked yet, and SIGTERM saves all the same
        self.checkpoint.save(self.state())
