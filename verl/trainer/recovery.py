"""A run that goes on when one of its processes is lost.

::

    hold ── step ── hold ── step ── ✗ rank 1 died in update_actor
                     │                 │ all workers end, a pause, new workers start
                     └──── restore ◄───┘ the state after the last step that was held: from the memory of Ray's
                                         object store, else the newest checkpoint, else the beginning

Whatever is random in a step follows from its number or is part of the state, so a step that is done again
gives the same bits. What was logged already is not logged again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from verl.errors import ProcessLostError
from verl.trainer.run_state import RunState
from verl.trainer.termination import EXIT_CODE, StepInterrupted

if TYPE_CHECKING:
    from verl.trainer.config.recovery import RecoveryConfig
    from verl.trainer.loop import TrainingLoop

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class HeldState:
    """The run after a step."""

    driver: RunState
    workers: dict[str, Any]
    """References of every rank's snapshot, by the name of its group; Ray's object store holds them."""


class Recovery:
    """Takes a run back to its last whole state when a process is lost, and counts what that costs.

    Args:
        settings: how often, and from what.
        run: what is taken back.
    """

    def __init__(self, settings: RecoveryConfig, run: TrainingLoop) -> None:
        self.settings = settings
        self.run = run
        self.restarts = 0
        """Since the run was started."""
        self.lost_s = 0.0
        """Seconds that were lost by them: from the end of the step that was gone back to, until work went on."""
        self.redone_steps = 0
        """Finished steps that had to be done again."""
        self._in_a_row = 0
        self._first: ProcessLostError | None = None
        self._furthest = -1
        self._begin: RunState | None = None
        self._held: list[HeldState] = []
        self._documents: dict[str, dict[str, bytes]] = {}
        self._held_at = time.monotonic()

    def protect(self, task: Callable[[], T]) -> T:
        """Do ``task``, which drives the run from whatever step it is at; after a loss go back and do it again.

        Raises:
            ProcessLostError: more losses than ``max_restarts`` without a step that was not done before.
            StepInterrupted: a loss and SIGTERM, and there is a state that :meth:`save` can write.
            SystemExit: a loss and SIGTERM, and there is none.
        """
        while True:
            try:
                return task()
            except ProcessLostError as error:
                self._go_back(error)

    def hold(self) -> None:
        """Remember the run as it is now, between two steps. Workers copy their state before their next call."""
        state = self.run.state()
        self._begin = self._begin or state
        if state.global_step > self._furthest:
            self._furthest, self._first, self._in_a_row = state.global_step, None, 0
        if self._held and self._held[-1].driver.global_step == state.global_step:
            return
        self._held_at = time.monotonic()
        frequency, groups = self.settings.snapshot_freq, self.run.trained_groups
        survive = all(group.outlived_by_outputs for group in groups.values())
        if not survive or not frequency or state.global_step % frequency:
            return
        if self._held and not self._is_whole(self._held[-1]):
            logger.warning("the state after step %d could not be held in memory", self._held.pop().driver.global_step)
        if not self._documents:
            self._documents = {name: group.documents()[0] for name, group in groups.items()}
        snapshots = {name: group.execute_all_async("snapshot", state.global_step) for name, group in groups.items()}
        # The one before stays until this one is whole, which it is when the workers have answered once more.
        self._held = [*self._held[-1:], HeldState(state, snapshots)]

    @property
    def can_save(self) -> bool:
        """Whether a state is held that :meth:`save` can write without the workers."""
        return len(self._held) > 1 or bool(self._held and self._is_whole(self._held[-1]))

    def save(self) -> None:
        """Write the newest whole state that is held as a checkpoint; the workers may be gone.

        Raises:
            CheckpointError: it cannot be written.
        """
        held = next(held for held in reversed(self._held) if self._is_whole(held))
        groups = self.run.trained_groups
        ranks = {name: groups[name].wait_for(references) for name, references in held.workers.items()}
        self.run.checkpoint.save_held(held.driver, ranks, self._documents)
        logger.warning("Saved step %d of %d.", held.driver.global_step, self.run.total_training_steps)

    def metrics(self) -> dict[str, float]:
        """``recovery/restarts``, ``recovery/redone_steps`` and ``recovery/lost_s`` so far, if anything was lost."""
        if not self.restarts:
            return {}
        return {
            "recovery/restarts": float(self.restarts),
            "recovery/redone_steps": float(self.redone_steps),
            "recovery/lost_s": self.lost_s,
        }

    def _is_whole(self, held: HeldState) -> bool:
        groups = self.run.trained_groups
        return all(groups[name].outputs_arrived(references) for name, references in held.workers.items())

    def _go_back(self, error: ProcessLostError) -> None:
        while True:
            self._first = self._first or error
            self._end_if_terminated(error)
            if self.settings.max_restarts == 0:
                raise error
            self._in_a_row += 1
            self.run.pass_limits.learn(error)
            if self._in_a_row > self.settings.max_restarts:
                raise self._gave_up(self._first, error) from error
            pause = min(LONGEST_PAUSE_S, self.settings.backoff_s * 2 ** (self._in_a_row - 1))
            logger.error("%s", _told(error))
            logger.error(
                "Restart %d of at most %d in %.1f s: all workers are started anew.",
                self._in_a_row,
                self.settings.max_restarts,
                pause,
            )
            time.sleep(pause)
            self._end_if_terminated(error)  # a machine that is taken away ends its processes in any order
            self.restarts += 1
            reached = self.run.global_steps
            try:
                self.run.restart_workers()
                source = self._restore()
            except ProcessLostError as another:
                error = another
                continue
            self.redone_steps += max(0, reached - 1 - self.run.global_steps)
            self.lost_s += time.monotonic() - self._held_at
            self._held_at = time.monotonic()
            logger.warning("Going on after step %d, from %s.", self.run.global_steps, source)
            return

    def _end_if_terminated(self, error: ProcessLostError) -> None:
        """After SIGTERM no workers are started again: what is held in memory is saved, if there is anything."""
        if not self.run.termination.requested:
            return
        logger.error("%s", _told(error))
        if self.can_save:
            raise StepInterrupted from error
        logger.warning("No state is held in memory: the run ends, and goes on from its newest checkpoint.")
        raise SystemExit(EXIT_CODE)

    def _restore(self) -> str:
        """Put workers and driver back to the newest state there is; where it was found."""
        while self._held:
            held = self._held.pop()  # one that cannot be put back is not tried again
            if not self._is_whole(held):
                continue
            for name, group in self.run.trained_groups.items():
                group.restore(held.workers[name])
            self.run.go_on_from(held.driver)
            self._held.append(held)
            return "memory"
        saved = self.run.checkpoint.load_again()
        if saved is None and self._begin is not None:
            self.run.go_on_from(self._begin)
        elif saved is not None:
            self.run.go_on_from(saved)
        return "the beginning" if saved is None else "the newest checkpoint"

    def _gave_up(self, first: ProcessLostError, last: ProcessLostError) -> ProcessLostError:
        said = [
            _told(first),
            f"The run was restarted {self.settings.max_restarts} times without finishing a step, and stops "
            "(trainer.recovery.max_restarts).",
        ]
        return ProcessLostError("\n".join(said if last is first else [*said, f"The last loss: {_told(last)}"]))


def _told(error: ProcessLostError) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
