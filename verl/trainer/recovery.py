"""Handling of failed steps: a process is lost, a pass does not fit into memory, an update is not finite.

::

    hold ── step ── hold ── step ── ✗ rank 1 died in update_actor
                     │                 │ all workers end, a pause, new workers start; those that only sample alone, if
                     │                 │ they alone are lost and a state is in memory
                     └──── restore ◄───┘ the last state that was held: in memory (Ray's object store), else the
                                         newest checkpoint, else the beginning

All randomness of a step follows from its number or is part of the state, so a repeated step gives the same bits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from verl.checkpoint.run import TrainerCheckpoint
from verl.checkpoint.states import RunState
from verl.errors import DataError, NonFiniteError, PassTooLargeError, ProcessLostError
from verl.protocol import DataProto
from verl.single_controller.base.dispatch import PendingOutputs
from verl.single_controller.base.worker_group import WorkerGroup
from verl.supervision.termination import EXIT_CODE, StepInterrupted, Termination
from verl.workers.engine.non_finite import NonFinite

if TYPE_CHECKING:
    from verl.config import BaseTrainerConfig, RecoveryConfig

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0
SNAPSHOT_SHARE = 0.02
"""Share of a run's time that snapshots in memory may take."""
STORE_SHARE = 0.8
"""Share of Ray's object store that they may take: batches of the step lie there too."""
SAVED_IN_A_ROW = 3
"""Batches saved of consecutive bad steps: the first ones."""
SAVED_BATCHES = 12
"""Batches kept in the folder; older ones are deleted."""
SHOWN_PROBLEMS = 4
"""Problems listed in a message."""
SPLITS_METRIC = "recovery/micro_batch_splits"


@dataclass(frozen=True)
class HeldState:
    """A snapshot of the run after a step."""

    driver: RunState
    workers: dict[str, PendingOutputs[object]]
    """References to the snapshots of all ranks in Ray's object store, by worker group."""


class RecoverableRun(Protocol):
    """A run that can be restored to an earlier state; the methods that :class:`Recovery` calls."""

    global_steps: int

    @property
    def trained_groups(self) -> Mapping[str, WorkerGroup]:
        """Worker groups with training state, by the checkpoint sub-folder that each writes."""
        ...

    def state(self) -> RunState:
        """The driver's state between two steps."""
        ...

    def restore(self, state: RunState) -> None:
        """Restore the driver to ``state``."""

    def resume(self) -> None:
        """Load the state with which the run begins into workers and driver."""

    def restart_workers(self) -> None:
        """End all workers and start new ones."""

    def restart_rollout_pool(self) -> bool:
        """Start the rollout pool anew if it alone is lost, and end what it sampled; else do nothing, and return false.

        The workers in training go on, and have to be restored to an earlier state.
        """
        ...


class Recovery:
    """Restore a run to its newest complete state when a process is lost, and count restarts and lost time.

    ::

        while steps are left:
            with recovery.guard():      # if a process is lost inside, the run is restored to the last snapshot()
                recovery.snapshot()
                step()

    Args:
        checkpoint: the run's checkpoints, for states that are not in memory.
        limits: updated if a process ended because a pass did not fit into memory.
        termination: after SIGTERM, workers are not restarted.
    """

    def __init__(
        self,
        settings: RecoveryConfig,
        run: RecoverableRun,
        checkpoint: TrainerCheckpoint,
        limits: PassLimits,
        termination: Termination,
    ) -> None:
        self.settings = settings
        self.run = run
        self.checkpoint = checkpoint
        self.limits = limits
        self.termination = termination
        self.restarts = 0
        """Restarts of the workers since this process began."""
        self.lost_s = 0.0
        """Seconds lost by restarts: from the last call of :meth:`hold` until training continues."""
        self.replacements = 0
        """Starts of the rollout pool alone."""
        self.redone_steps = 0
        """Finished steps that had to be repeated."""
        self._in_a_row = 0
        self._first: ProcessLostError | None = None
        self._furthest = -1
        self._begin: RunState | None = None
        self._held: list[HeldState] = []
        self._documents: dict[str, dict[str, bytes]] = {}
        self._held_at = time.monotonic()
        self._schedule = SnapshotSchedule(settings.snapshot_freq)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Restore the run to its newest state if a process is lost inside the block; the caller then continues.

        Raises:
            ProcessLostError: processes were lost more than ``max_restarts`` times without a new step in between.
            StepInterrupted: a process was lost after SIGTERM, and :meth:`save` can write a state from memory.
            SystemExit: a process was lost after SIGTERM, and no state is held in memory.
        """
        try:
            yield
        except ProcessLostError as error:
            self._go_back(error)

    def snapshot(self) -> None:
        """Take a snapshot of the run between two steps if one is due; see :class:`SnapshotSchedule`.

        Repeated calls for one step do nothing. Without Ray no snapshots are taken, as they would end with the workers.
        """
        state = self.run.state()
        self._begin = self._begin or state
        if state.global_step > self._furthest:
            self._furthest, self._first, self._in_a_row = state.global_step, None, 0
        if self._held and self._held[-1].driver.global_step == state.global_step:
            return
        self._held_at = time.monotonic()
        groups = self.run.trained_groups
        survive = all(group.outputs_survive_workers for group in groups.values())
        if not survive or not self._schedule.is_due(state.global_step, groups):
            return
        if self._held and not self._is_whole(self._held[-1]):
            logger.warning("the state after step %d could not be held in memory", self._held.pop().driver.global_step)
        if not self._documents:
            self._documents = {name: group.documents()[0] for name, group in groups.items()}
        snapshots = {name: group.execute_all_async("snapshot", state.global_step) for name, group in groups.items()}
        # Keep the previous snapshot until this one is complete.
        self._held = [*self._held[-1:], HeldState(state, snapshots)]
        for name, references in snapshots.items():
            groups[name].wait_until_made(references)
        self._schedule.record(time.monotonic() - self._held_at)

    def replace(self, error: ProcessLostError, start: Callable[[], None]) -> None:
        """Start a rollout pool anew that was lost, while the trainer goes on; may be called in any thread.

        It counts as a restart of the workers: after a new step there may be ``max_restarts`` again.

        Args:
            error: the loss.
            start: starts the pool.

        Raises:
            ProcessLostError: the loss, if it is one too many, or after SIGTERM; all workers have to be restarted then.
        """
        while not self.termination.requested and self._in_a_row < self.settings.max_restarts:
            self._first = self._first or error
            self._in_a_row += 1
            pause = self._pause_s
            logger.error(
                "The rollout pool is started anew (restart %d of at most %d, in %.1f s), and the trainer goes on: %s",
                self._in_a_row,
                self.settings.max_restarts,
                pause,
                _full_text(error),
            )
            time.sleep(pause)
            self.replacements += 1
            try:
                start()
            except ProcessLostError as another:
                error = another
            else:
                logger.warning("The rollout pool is there again.")
                return
        raise error

    @property
    def _pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, self.settings.backoff_s * 2 ** (self._in_a_row - 1))

    @property
    def can_save(self) -> bool:
        """True if :meth:`save` can write a state from memory, without the workers, that no checkpoint is newer than."""
        newer = [held for held in self._held if self._is_newest(held)]
        # Of two snapshots the older one is complete; see snapshot.
        return bool(newer) and (newer[0] is not self._held[-1] or self._is_whole(newer[0]))

    def save(self) -> int:
        """Write the newest complete snapshot as a checkpoint and return its step; the workers may have ended.

        Raises:
            CheckpointError: it cannot be written.
        """
        held = next(held for held in reversed(self._held) if self._is_whole(held))
        groups = self.run.trained_groups
        ranks = {name: groups[name].wait_for(references) for name, references in held.workers.items()}
        self.checkpoint.save_held(held.driver, ranks, self._documents)
        return held.driver.global_step

    def metrics(self) -> dict[str, float]:
        """``recovery/restarts``, ``recovery/redone_steps`` and ``recovery/lost_s`` so far, and
        ``recovery/rollout_restarts``; each only after such a restart.
        """
        metrics = {"recovery/rollout_restarts": float(self.replacements)} if self.replacements else {}
        if not self.restarts:
            return metrics
        return metrics | {
            "recovery/restarts": float(self.restarts),
            "recovery/redone_steps": float(self.redone_steps),
            "recovery/lost_s": self.lost_s,
        }

    def _is_newest(self, held: HeldState) -> bool:
        """Return whether this process has saved no checkpoint of a later step."""
        return held.driver.global_step >= (self.checkpoint.last_saved or 0)

    def _is_whole(self, held: HeldState) -> bool:
        groups, sampled = self.run.trained_groups, held.driver.pending.futures
        if not all(future.done() and future.exception() is None for future in sampled):
            return False
        return all(groups[name].outputs_arrived(references) for name, references in held.workers.items())

    def _go_back(self, error: ProcessLostError) -> None:
        while True:
            self._first = self._first or error
            self._end_if_terminated(error)
            if self.settings.max_restarts == 0:
                raise error
            self._in_a_row += 1
            self.limits.learn(error)
            if self._in_a_row > self.settings.max_restarts:
                raise self._restart_limit_error(self._first, error) from error
            pause = self._pause_s
            logger.error("%s", _full_text(error))
            logger.error("Restart %d of at most %d in %.1f s.", self._in_a_row, self.settings.max_restarts, pause)
            time.sleep(pause)
            # Again after the pause: a machine that shuts down may kill workers before SIGTERM reaches this process.
            self._end_if_terminated(error)
            self.restarts += 1
            reached = self.run.global_steps
            try:
                has_state = any(self._is_newest(held) and self._is_whole(held) for held in self._held)
                is_pool_alone = has_state and self.run.restart_rollout_pool()
                if not is_pool_alone:
                    self.run.restart_workers()
                source = self._restore()
            except ProcessLostError as another:
                error = another
                continue
            self.redone_steps += max(0, reached - 1 - self.run.global_steps)
            self.lost_s += time.monotonic() - self._held_at
            self._held_at = time.monotonic()
            started = "the rollout pool was" if is_pool_alone else "all workers were"
            logger.warning("Going on after step %d, from %s; %s started anew.", self.run.global_steps, source, started)
            return

    def _end_if_terminated(self, error: ProcessLostError) -> None:
        """After SIGTERM, end the run in place of restarting it; a snapshot in memory is then saved by the caller."""
        if not self.termination.requested:
            return
        logger.error("%s", _full_text(error))
        if self.can_save:
            raise StepInterrupted from error
        logger.warning(
            "No state newer than the newest checkpoint is held in memory: the run ends, and goes on from that."
        )
        raise SystemExit(EXIT_CODE)

    def _restore(self) -> str:
        """Restore workers and driver to the newest state; return where it was found."""
        while self._held:
            held = self._held.pop()  # removed first, so that one that fails to load is not tried again
            if not (self._is_newest(held) and self._is_whole(held)):
                continue
            for name, group in self.run.trained_groups.items():
                group.restore(held.workers[name])
            self.run.restore(held.driver)
            self._held.append(held)
            return "memory"
        if self._begin is None:  # the process was lost before the run had resumed
            self.run.resume()
            return "the beginning"
        saved = self.checkpoint.load_again()
        self.run.restore(saved or self._begin)
        return "the beginning" if saved is None else "the newest checkpoint"

    def _restart_limit_error(self, first: ProcessLostError, last: ProcessLostError) -> ProcessLostError:
        lines = [
            _full_text(first),
            f"The run was restarted {self.settings.max_restarts} times without finishing a step, and stops "
            "(trainer.recovery.max_restarts).",
        ]
        return ProcessLostError("\n".join(lines if last is first else [*lines, f"The last loss: {_full_text(last)}"]))


class SnapshotSchedule:
    """Decide after which steps a snapshot is taken.

    Without a given frequency one is due when the time since the last is ``1 / SNAPSHOT_SHARE`` times what that one
    took, so that they take that share of the run. They are off where two of them, the last one and its successor, need
    more than ``STORE_SHARE`` of Ray's object store.

    Args:
        frequency: ``trainer.recovery.snapshot_freq``.
    """

    def __init__(self, frequency: int | None) -> None:
        self.frequency = frequency
        self._has_room: bool | None = None
        self._ended = -math.inf
        self._took = 0.0

    def is_due(self, step: int, groups: Mapping[str, WorkerGroup]) -> bool:
        """Return whether to take a snapshot after ``step`` finished steps; asks the workers for its size once."""
        if self.frequency is not None:
            return self.frequency > 0 and step % self.frequency == 0
        if self._has_room is None:
            self._has_room = self._fits(groups)
        return self._has_room and time.monotonic() - self._ended >= self._took / SNAPSHOT_SHARE

    def record(self, seconds: float) -> None:
        """Remember what the snapshot took that has just been made."""
        self._ended, self._took = time.monotonic(), seconds

    def _fits(self, groups: Mapping[str, WorkerGroup]) -> bool:
        needed = 2 * sum(sum(group.snapshot_bytes()) for group in groups.values())
        store = max((group.held_bytes_limit() for group in groups.values()), default=0)
        if needed <= STORE_SHARE * store:
            return True
        logger.warning(
            "No state is held in memory, because two take %.1f GB and Ray's object store has %.1f GB: after the loss "
            "of a process the run goes on from its newest checkpoint. Give Ray more (ray start --object-store-memory, "
            "and a /dev/shm of that size), or save often (trainer.save_freq).",
            needed / 1e9,
            store / 1e9,
        )
        return False


def _full_text(error: ProcessLostError) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


class PassLimits:
    """Size limits of passes found by workers that ran out of memory, kept for the workers started after them.

    Args:
        may_cut: ``trainer.recovery.split_on_out_of_memory``.
    """

    def __init__(self, may_cut: bool) -> None:
        self.may_cut = may_cut
        self.limits: dict[str, int] = {}
        self._cuts = 0
        self._worker_cuts: dict[str, float] = {}

    def learn(self, error: BaseException) -> None:
        """Record the limit of a :class:`PassTooLargeError` among the causes of ``error``; ignore other errors."""
        cause = _cause(error)
        if cause is not None:
            self.limits[cause.kind] = min(cause.limit, self.limits.get(cause.kind, cause.limit))
            self._cuts += 1
            self._cuts += int(sum(self._worker_cuts.values()))
            self._worker_cuts = {}

    def send_to(self, groups: Iterable[WorkerGroup]) -> None:
        """Send the limits to newly started workers, unless they equal the workers' defaults."""
        if self.limits or not self.may_cut:
            for group in groups:
                group.limit_passes(self.may_cut, self.limits)

    def take_splits(self, update: str, metrics: dict[str, float]) -> None:
        """Move an update's count of splits from ``metrics`` here: actor and critic report it under the same name."""
        if SPLITS_METRIC in metrics:
            self._worker_cuts[update] = metrics.pop(SPLITS_METRIC)

    def metrics(self) -> dict[str, float]:
        """``recovery/micro_batch_splits``: how often passes were made smaller; empty if never."""
        cuts = self._cuts + sum(self._worker_cuts.values())
        return {SPLITS_METRIC: cuts} if cuts else {}


def _cause(error: BaseException | None) -> PassTooLargeError | None:
    """Find the rank's PassTooLargeError among the causes of the driver's error."""
    while error is not None:
        if isinstance(error, PassTooLargeError):
            return error
        inside = getattr(error, "cause", None)  # Ray's error holds the worker's exception in this attribute
        if isinstance(inside, PassTooLargeError):
            return inside
        error = error.__cause__
    return None


class BadSteps:
    """Count steps with a skipped update, keep their batches, and stop the run after ``limit`` of them in a row.

    Updates with non-finite values are skipped by the workers. The counts are part of a checkpoint.

    Args:
        limit: bad steps in a row that stop the run; None for no limit.
        folder: for the batches of bad steps.
    """

    def __init__(self, limit: int | None, folder: Path) -> None:
        self.limit = limit
        self.folder = folder
        self.total = 0
        self.in_a_row = 0
        self.last_step = 0
        self._texts: list[str] = []
        self._saved_folder: Path | None = None

    @classmethod
    def from_config(cls, trainer: BaseTrainerConfig) -> BadSteps:
        """Read ``trainer.recovery``."""
        recovery = trainer.recovery
        folder = recovery.bad_batch_dir or Path(trainer.default_local_dir) / "bad_batches"
        return cls(recovery.max_bad_steps, Path(folder).expanduser())

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"total": self.total, "in_a_row": self.in_a_row, "last_step": self.last_step}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.total, self.in_a_row, self.last_step = (int(state[name]) for name in ("total", "in_a_row", "last_step"))

    def record(
        self, step: int, update: str, metrics: Mapping[str, float], batch: DataProto, problems: Sequence[NonFinite]
    ) -> None:
        """Count the step, keep its batch and log a warning if the update skipped an optimizer step.

        Two updates of one step (actor and critic) count once.

        Args:
            step: the training step.
            update: name of the update, such as ``update_actor``.
            metrics: of the update; ``.../skipped_steps`` counts the skipped optimizer steps.
            batch: the batch that the update was computed from.
            problems: the non-finite values, by rows of ``batch``.
        """
        skipped = sum(value for name, value in metrics.items() if name.endswith("/skipped_steps"))
        if not skipped:
            return
        if step != self.last_step:
            self.in_a_row = self.in_a_row + 1 if step == self.last_step + 1 else 1
            self.total += 1
            self.last_step = step
        uids = batch.non_tensor_batch.get("uid")
        self._texts = [
            str(problem) if problem.row is None or uids is None else f"{problem} [uid {uids[problem.row]}]"
            for problem in problems
        ]
        if self.in_a_row <= SAVED_IN_A_ROW or self._saved_folder is None:
            self._saved_folder = self._keep(step, update, metrics, batch)
        logger.warning(
            "%s of step %d left out %d optimizer step(s), and weights and optimizer are as they were: %s. Batch: %s",
            update,
            step,
            int(skipped),
            "; ".join(self._texts[:SHOWN_PROBLEMS]),
            self._saved_folder or "not kept",
        )

    def metrics(self) -> dict[str, float]:
        """``recovery/bad_steps``: steps with a skipped update so far."""
        return {"recovery/bad_steps": float(self.total)}

    def stop_if_too_many(self, step: int) -> None:
        """Raise NonFiniteError if the last ``limit`` steps, including ``step``, were bad."""
        if self.limit is None or step != self.last_step or self.in_a_row < self.limit:
            return
        where = f"The batch lies in {self._saved_folder} (DataProto.load_from_disk)." if self._saved_folder else ""
        raise NonFiniteError(
            f"the update of {self.in_a_row} step(s) in a row, up to step {step}, was left out because a loss or a "
            f"gradient was not finite (trainer.recovery.max_bad_steps={self.limit}). In step {step}: "
            f"{'; '.join(self._texts[:SHOWN_PROBLEMS])}. {where} The weights are those before these steps. If a column "
            "of the batch is the cause, look where it is made; if it is the model's output, lower the learning rate "
            "(optim.lr), clip more (optim.clip_grad), compute in fp32, or resume from an earlier checkpoint."
        )

    def _keep(self, step: int, update: str, metrics: Mapping[str, float], batch: DataProto) -> Path | None:
        """Write the batch, with problems and metrics in its ``meta_info``; return None if it cannot be written."""
        path = self.folder / f"step_{step}_{update}.dataproto"
        about = {"global_steps": step, "non_finite": list(self._texts), "metrics": dict(metrics)}
        try:
            _write(replace(batch, meta_info=about), path)
            for old in sorted(self.folder.glob("step_*.dataproto"), key=_step_of)[:-SAVED_BATCHES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the batch of step %d cannot be kept in %s: %s", step, path, error)
            return None
        return path


def _step_of(path: Path) -> int:
    """The step in a file's name; modification times would be wrong after the clock is set back."""
    digits = path.stem.split("_")[1]
    return int(digits) if digits.isdecimal() else 0


def _write(batch: DataProto, path: Path) -> None:
    """Write the batch; without its object columns (but ``uid``) if one holds objects that a file cannot store."""
    try:
        batch.save_to_disk(path)
    except DataError as error:
        logger.warning("%s holds the tensors and uid only: %s", path, error)
        names = [name for name in ("uid",) if name in batch.non_tensor_batch]
        batch.select(non_tensor_batch_keys=names).save_to_disk(path)
