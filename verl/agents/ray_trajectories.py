"""The trajectories of one rollout on Ray: they are given to processes, and those of a lost process to others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayActorError

from verl.agents.columns import ColumnsInParts, SequenceColumns
from verl.agents.worker import Trajectory, TrajectoryResult, failed
from verl.config import RolloutConfig
from verl.errors import WorkerError
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors
from verl.protocol.stored import by_reference
from verl.serving.ray import CHECK_S
from verl.single_controller.ray.private import brief
from verl.single_controller.ray.processes import finished_of
from verl.single_controller.ray.watched_actor import ActorSilentError, WatchedActor

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a trajectory is begun whose process dies or hangs; the last time without others beside it."""


def shared_of(trajectory: Trajectory) -> list[SharedTensors]:
    """Return what the row of a trajectory shares with others: its images."""
    return [value for value in trajectory.row.values() if isinstance(value, SharedTensors) and value.nbytes]


class RunningTrajectories:
    """The trajectories of one rollout, and the workers that run them.

    Args:
        rollout: ``actor_rollout_ref.rollout``.
        columns: makes the columns of trajectories that no process could run to their end.
        trajectories: what to run.
        workers: the actors; one that died or hangs is replaced in this list.
        replacement: ends an actor, and starts the one that takes its place.
        round_index: number of the round of the engines that answer; see :class:`verl.serving.ray.RouterActor`.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        columns: SequenceColumns,
        trajectories: Sequence[Trajectory],
        workers: list[WatchedActor],
        replacement: Callable[[WatchedActor], WatchedActor],
        round_index: int,
    ) -> None:
        self._rollout, self._trajectories, self._columns = rollout, trajectories, columns
        self._workers, self._replacement, self._round = workers, replacement, round_index
        self._begun: Counter[int] = Counter()
        self._running: dict[ObjectRef, tuple[int, int, WatchedActor]] = {}
        """Trajectory, slot and worker of each reference to a result."""
        self._alone: list[int] = []
        """Trajectories whose process was lost too often to run them beside others."""
        self._results: dict[int, TrajectoryResult] = {}
        self._held: dict[int, list[int]] = {slot: [] for slot in range(len(workers))}
        """The trajectories of each slot that have ended, and whose tokens still are with its worker."""
        self._parts = ColumnsInParts()
        self.silences: list[list[float | None]] = []
        """Of each worker, for how long each engine has answered none of its requests; see ``RaySession.check``."""
        for index in range(len(trajectories)):
            self._begin(index, index % len(workers))

    def look(self) -> bool:
        """Take results for at most ``CHECK_S`` seconds; return whether there are all.

        Raises:
            WorkerError: a worker cannot start.
        """
        if not any(self._begun[index] < ATTEMPTS for index, _, _ in self._running.values()):
            self._take_columns()
            self._begin_alone()
        if self._running:
            for reference in finished_of(list(self._running), CHECK_S, fetch_local=False):
                self._take(reference)
        self.silences = []
        for slot, worker in enumerate(list(self._workers)):
            try:
                self.silences.append(worker.look() or [])
            except (ActorSilentError, RayActorError) as error:
                self._replace(slot, worker, error)
        return not (self._running or self._alone or any(self._held.values()))

    @property
    def results(self) -> list[TrajectoryResult]:
        """The results, in the order of the trajectories; their outputs have no tokens."""
        return [self._results[index] for index in range(len(self._trajectories))]

    @property
    def columns(self) -> DataProto:
        """The columns of all sequences, in the same order."""
        return self._parts.joined()

    def _begin(self, index: int, slot: int) -> None:
        self._begun[index] += 1
        worker, trajectory = self._workers[slot], self._trajectories[index]
        for value in shared_of(trajectory):
            value.store(ray.put)
        with by_reference():
            reference = worker.actor.run.remote(index, trajectory, self._round)
        self._running[reference] = (index, slot, worker)

    def _begin_alone(self) -> None:
        """Run one of the trajectories that may end their process in each worker that has nothing else to lose."""
        busy = {slot for _, slot, _ in self._running.values()}
        for slot in range(len(self._workers)):
            if self._alone and slot not in busy:
                self._begin(self._alone.pop(0), slot)

    def _take_columns(self) -> None:
        """Take the columns of the trajectories that have ended; those of a lost worker are begun again."""
        asked = {
            slot: self._workers[slot].actor.hand_in.remote(numbers) for slot, numbers in self._held.items() if numbers
        }
        for slot, reference in asked.items():
            worker, numbers = self._workers[slot], self._held[slot]
            try:
                columns: DataProto = worker.result(reference)
            except (ActorSilentError, RayActorError) as error:
                self._replace(slot, worker, error)
                continue
            columns.remember(reference)
            self._parts.add(numbers, [self._results[index] for index in numbers], columns)
            self._held[slot] = []

    def _take(self, reference: ObjectRef) -> None:
        index, slot, worker = self._running.pop(reference)
        try:
            self._results[index] = worker.result(reference)
        except (ActorSilentError, RayActorError) as error:
            self._replace(slot, worker, error)
            self._begin_again(index)
            return
        if self._workers[slot] is worker:
            self._held[slot].append(index)
        else:  # the process was lost afterwards, and the tokens with it
            self._begin_ended(index, slot)

    def _replace(self, slot: int, worker: WatchedActor, error: RayActorError | ActorSilentError) -> None:
        """Replace a worker, unless it was; what it ran fails with a RayActorError, and is begun again."""
        if self._workers[slot] is not worker:
            return
        if isinstance(error, RayActorError) and error.actor_init_failed:
            raise WorkerError(f"a process of agent loops cannot start: {error}") from error
        logger.warning("a process of agent loops is lost, and is replaced: %s", brief(str(error)))
        self._workers[slot] = self._replacement(worker)
        ended, self._held[slot] = self._held[slot], []
        for index in ended:
            self._begin_ended(index, slot)

    def _begin_ended(self, index: int, slot: int) -> None:
        self._begun[index] -= 1  # it did end, so it is not what its process was lost by
        self._begin(index, slot)

    def _begin_again(self, index: int) -> None:
        if self._begun[index] >= ATTEMPTS:
            message = f"its process died or hung each of the {ATTEMPTS} times that it was begun"
            trajectory = self._trajectories[index]
            result = self._results[index] = failed(trajectory, (), "agent_error", message, self._rollout)
            self._parts.add([index], [result], self._columns.of([(trajectory, result)]))
        elif self._begun[index] == ATTEMPTS - 1:
            self._alone.append(index)
        else:
            self._begin(index, index % len(self._workers))
