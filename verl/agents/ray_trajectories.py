"""Trajectories on Ray: they are given to processes, and those of a lost process to others.

All of it runs in one event loop of the driver. :class:`AgentProcesses` are the processes, watched as long as the
loop runs; a :class:`TrajectoryRun` is what becomes of the trajectories of one call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from verl.agents.columns import ColumnsInParts, SequenceColumns
from verl.agents.worker import Trajectory, TrajectoryProgress, TrajectoryResult, failed
from verl.config import RolloutConfig
from verl.errors import ProcessLostError, WorkerError
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors
from verl.protocol.stored import by_reference
from verl.serving.ray import CHECK_S
from verl.single_controller.ray.private import brief
from verl.single_controller.ray.watched_actor import ActorSilentError, WatchedActor

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Attempts at a trajectory whose process dies or hangs; the last one in a process of its own."""


def shared_of(trajectory: Trajectory) -> list[SharedTensors]:
    """Return what the row of a trajectory shares with others: its images."""
    return [value for value in trajectory.row.values() if isinstance(value, SharedTensors) and value.nbytes]


@dataclass(eq=False)
class AgentProcess:
    """A process that runs trajectories."""

    actor: WatchedActor
    load: int = 0
    """Trajectories that it runs, or whose tokens it has."""
    silences: list[float | None] = field(default_factory=list)
    """For how long each engine has answered none of its requests; see ``RaySession.check``."""
    report: tuple[int, TrajectoryProgress] = 0, TrajectoryProgress()
    """The number of threads that do not end, and what its trajectories are doing."""
    has_started: bool = False
    """True once it has answered a call. Calls may be sent before; they are answered when the process has started."""
    loss: asyncio.Task[None] | None = None
    """Ends the process and starts another one, once this one is lost."""
    holds_for: set[TrajectoryRun] = field(default_factory=set)
    """Whose tokens it has; they learn of its loss."""


class AgentProcesses:
    """The processes that run trajectories. Methods are for the event loop, unless they say otherwise.

    Args:
        rollout: ``actor_rollout_ref.rollout``.
        start: starts a process.
        join: lets the engines serve a process that has started; may take time.
        end: ends a process and all that it has started; may take time.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        start: Callable[[], WatchedActor],
        join: Callable[[WatchedActor], object],
        end: Callable[[WatchedActor], object],
    ) -> None:
        self.rollout = rollout
        self._start, self._join, self._end = start, join, end
        self._workers: list[AgentProcess] = []
        """Processes that take trajectories."""
        self._retired: list[AgentProcess] = []
        """Processes that end when they have no trajectory left."""
        self._alone = asyncio.Lock()
        """Held by the trajectory that runs in a process of its own."""
        self._quarantine: AgentProcess | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self.keys = itertools.count()
        """Names for trajectories, by which workers know them."""

    def start(self, count: int) -> None:
        """Start so many processes, the first ones."""
        self._workers = [self._new() for _ in range(count)]

    def raise_failure(self) -> None:
        """Raise what ends all trajectories; from any thread.

        Raises:
            ProcessLostError: Ray has ended.
            WorkerError: a process cannot start.
        """
        if self._failure is not None:
            raise self._failure

    def silences(self) -> list[list[float | None]]:
        """Return for each process the seconds since each engine last answered one of its requests; from any thread."""
        return [worker.silences for worker in self._all()]

    def progress(self) -> TrajectoryProgress:
        """Return the progress of the trajectories of all processes; from any thread."""
        return TrajectoryProgress.total(worker.report[1] for worker in self._all())

    async def partial_responses(self) -> list[DataProto]:
        """Return the tokens of single turns in each process; those of one that is lost are drawn again.

        A process that still starts has drawn none, and is not waited for.
        """
        started = [worker for worker in self._all() if worker.has_started and worker.loss is None]
        references: list[ObjectRef] = [worker.actor.actor.partial_responses.remote() for worker in started]
        batches = []
        for reference in references:
            with suppress(RayActorError):  # see _watch
                batches.append(await value_of(reference))
        return batches

    @asynccontextmanager
    async def lent(self, alone: bool) -> AsyncIterator[AgentProcess]:
        """Lend the process with the fewest trajectories, or one that runs no other."""
        if not alone:
            yield min(self._workers, key=lambda worker: worker.load)
            return
        async with self._alone:
            if self._quarantine is None:
                self._quarantine = self._new()
            yield self._quarantine

    async def lose(self, worker: AgentProcess, error: RayActorError | ActorSilentError) -> None:
        """Replace a process that is lost, unless it was.

        Raises:
            WorkerError: it could not start, so no other can.
        """
        if worker.loss is None:
            worker.loss = asyncio.create_task(self._replace(worker, error))
        await asyncio.shield(worker.loss)

    def release(self, worker: AgentProcess, count: int) -> None:
        """Take back trajectories whose tokens a process has no more."""
        worker.load -= count
        if worker.load == 0 and worker.loss is None:
            if worker is self._quarantine and not self._alone.locked():
                self._quarantine = None
                self._retired.append(worker)
            if worker in self._retired:
                worker.loss = self._spawn(self._end_retired(worker))

    def _all(self) -> list[AgentProcess]:
        return [*self._workers, *self._retired, *([self._quarantine] if self._quarantine else [])]

    def _new(self) -> AgentProcess:
        worker = AgentProcess(self._start())
        self._spawn(self._watch(worker))
        self._spawn(self._follow(worker))
        return worker

    async def _watch(self, worker: AgentProcess) -> None:
        """Notice that a process is lost."""
        while worker.loss is None:
            try:
                worker.silences = worker.actor.poll() or []
            except (ActorSilentError, RayActorError) as error:
                await self.lose(worker, error)
            await asyncio.sleep(CHECK_S)

    async def _follow(self, worker: AgentProcess) -> None:
        """Let a process join when it has started, and ask again and again what it is doing."""
        with suppress(RayActorError):  # see _watch
            while worker.loss is None:
                worker.report = await value_of(worker.actor.actor.report.remote())
                if not worker.has_started:
                    await asyncio.to_thread(self._join, worker.actor)
                    worker.has_started = True
                if worker.report[0] and worker in self._workers:
                    logger.warning("%d agent loop(s) do not end; their process is replaced", worker.report[0])
                    self._workers[self._workers.index(worker)] = self._new()
                    self._retired.append(worker)
                    self.release(worker, 0)
                await asyncio.sleep(CHECK_S)

    async def _replace(self, worker: AgentProcess, error: RayActorError | ActorSilentError) -> None:
        if isinstance(error, RayActorError) and error.actor_init_failed:
            raise WorkerError(f"a process of agent loops cannot start: {error}") from error
        logger.warning("a process of agent loops is lost, and is replaced: %s", brief(str(error)))
        if worker in self._workers:
            self._workers[self._workers.index(worker)] = self._new()
        elif worker in self._retired:
            self._retired.remove(worker)
        else:
            self._quarantine = None
        await asyncio.to_thread(self._end, worker.actor)
        for run in worker.holds_for:
            run.lost(worker)

    async def _end_retired(self, worker: AgentProcess) -> None:
        self._retired.remove(worker)
        await asyncio.to_thread(self._end, worker.actor)

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, ProcessLostError | WorkerError):
                logger.error("the watch over processes of agent loops failed", exc_info=error)
            self._failure = self._failure or error


class TrajectoryRun:
    """The trajectories of one call, until the columns of all are there.

    Args:
        workers: the processes.
        columns: makes the columns of trajectories that no process could run to their end.
        trajectories: what to run.
    """

    def __init__(self, workers: AgentProcesses, columns: SequenceColumns, trajectories: Sequence[Trajectory]) -> None:
        self._workers, self._columns, self._trajectories = workers, columns, trajectories
        self._losses: Counter[int] = Counter()
        """Number of times that the process of each trajectory was lost while it ran."""
        self._running: dict[asyncio.Task[tuple[AgentProcess | None, int, TrajectoryResult]], int] = {}
        self._results: dict[int, TrajectoryResult] = {}
        self._held: dict[AgentProcess, dict[int, int]] = {}
        """The trajectories that have ended, and whose tokens their worker still has, each with its key there."""
        self._parts = ColumnsInParts()
        self._events: asyncio.Queue[AgentProcess | asyncio.Task[Any]] = asyncio.Queue()
        """Trajectories that have ended, and workers that were lost."""

    async def ended(self) -> tuple[list[TrajectoryResult], DataProto]:
        """Run all; return the results, whose outputs have no tokens, and the columns, in the order of trajectories.

        Raises:
            WorkerError: a process cannot start.
        """
        for index in range(len(self._trajectories)):
            self._begin(index)
        try:
            while self._running or self._held:
                if self._running:
                    self._take(await self._events.get())
                else:
                    await self._take_columns()
        finally:  # after an error, or cancelled
            for task in self._running:
                task.cancel()
            for worker, keys in self._held.items():
                worker.actor.actor.drop.remote(list(keys.values()))
                worker.holds_for.discard(self)
                self._workers.release(worker, len(keys))
        return [self._results[index] for index in range(len(self._trajectories))], self._parts.joined()

    def lost(self, worker: AgentProcess) -> None:
        """Learn that a process is lost which has tokens of this run."""
        self._events.put_nowait(worker)

    def _begin(self, index: int) -> None:
        task = asyncio.create_task(self._outcome(index))
        self._running[task] = index
        task.add_done_callback(self._events.put_nowait)

    async def _outcome(self, index: int) -> tuple[AgentProcess | None, int, TrajectoryResult]:
        """Run a trajectory; return the worker that has its tokens, its key there, and the result."""
        trajectory = self._trajectories[index]
        while self._losses[index] < ATTEMPTS:
            async with self._workers.lent(alone=self._losses[index] == ATTEMPTS - 1) as worker:
                key = next(self._workers.keys)
                worker.load += 1
                has_tokens = False
                try:
                    for value in shared_of(trajectory):
                        value.store(ray.put)
                    with by_reference():
                        reference = worker.actor.actor.run.remote(key, trajectory)
                    result = await value_of(reference)
                    has_tokens = True
                    return worker, key, result
                except RayActorError as error:
                    await self._workers.lose(worker, error)
                    self._losses[index] += 1
                except asyncio.CancelledError:
                    worker.actor.actor.drop.remote([key])
                    raise
                finally:
                    if not has_tokens:
                        self._workers.release(worker, 1)
        message = f"its process died or hung each of the {ATTEMPTS} times that it was begun"
        return None, 0, failed(trajectory, (), "agent_error", message, self._workers.rollout)

    def _take(self, event: AgentProcess | asyncio.Task[tuple[AgentProcess | None, int, TrajectoryResult]]) -> None:
        if isinstance(event, AgentProcess):
            self._begin_ended(event)
            return
        index = self._running.pop(event)
        worker, key, result = event.result()
        self._results[index] = result
        if worker is None:
            self._parts.add([index], [result], self._columns.to_batch([(self._trajectories[index], result)]))
            return
        worker.holds_for.add(self)
        self._held.setdefault(worker, {})[index] = key
        if worker.loss is not None and worker.loss.done():  # it has told already
            self._begin_ended(worker)

    def _begin_ended(self, worker: AgentProcess) -> None:
        """Begin again what had ended in a process that was lost, and whose tokens are lost with it."""
        for index in self._held.pop(worker, ()):
            self._begin(index)

    async def _take_columns(self) -> None:
        """Take the columns of the trajectories that have ended; those of a lost process are begun again."""
        references = {
            worker: worker.actor.actor.hand_in.remote(list(keys.values())) for worker, keys in self._held.items()
        }
        for worker, reference in references.items():
            indices = list(self._held.get(worker, ()))
            try:
                columns: DataProto = await value_of(reference)
            except RayActorError as error:
                await self._workers.lose(worker, error)
                self._begin_ended(worker)
                continue
            columns.remember(reference)
            self._parts.add(indices, [self._results[index] for index in indices], columns)
            worker.holds_for.discard(self)
            self._workers.release(worker, len(self._held.pop(worker)))


async def value_of(reference: ObjectRef) -> Any:
    """Wait for the result of a call; cancelling the wait leaves the call alone."""
    return await asyncio.shield(asyncio.wrap_future(reference.future()))
