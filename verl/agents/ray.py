"""Agent loops in processes of their own, for ``trainer.controller=ray``.

::

    driver ── trajectories ──► worker 0 … worker n     one actor each; trajectories in threads, with a router
                                   │ requests, fetched by the ranks
                                   ▼
                                engine 0 … engine m    the ranks' rollout engines

Tokens stay with the worker that ran a trajectory. When all trajectories of a call of :meth:`RayAgents.run` have ended
it pads them to columns, which lie in Ray's object store as those of the ranks do (:mod:`verl.protocol.stored`); the
driver learns how each trajectory ended.

Workers run, and are watched, from the first trajectory to the end of the run, while engines serve and while they sleep.
One that dies, or does not answer for ``rollout.agent.hang_timeout_s``, is replaced, and its trajectories are run again
from their beginning with the same random numbers, also those that had ended (:mod:`verl.agents.ray_trajectories`). If
ranks are lost, trajectories go on, and their requests wait for other ranks. If the driver's router
(:mod:`verl.serving.ray`) is lost, which counts calls of tools too, all trajectories end.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import ray

from verl.agents.columns import Ended, SequenceColumns
from verl.agents.outputs import without_tokens
from verl.agents.partial_responses import to_batch
from verl.agents.polling import Polling
from verl.agents.ray_trajectories import AgentProcesses, TrajectoryRun, shared_of
from verl.agents.slots import SlotTable, count_by
from verl.agents.worker import AgentLoopWorker, Trajectory, TrajectoryProgress, TrajectoryResult
from verl.base.import_utils import prepare_process
from verl.config import PPOConfig
from verl.errors import ProcessLostError, WorkerError
from verl.protocol import DataProto
from verl.serving.ray import ImageConnection, RaySession, RouterActor
from verl.single_controller.ray.watched_actor import WatchedActor
from verl.tools.threads import LoopThread
from verl.utils.tokenizer import hf_processor, tokenizer_of

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from verl.single_controller.base.worker_group import WorkerGroup


class AgentRouter(RouterActor):
    """The driver's router, and the slots of the tools of a run."""

    def __init__(self, room: int, ended: str) -> None:
        super().__init__(room, ended)
        self._slots = SlotTable()

    async def take_slot(self, tool: str, limit: int, call: str, process: str) -> None:
        """See :meth:`SlotTable.take`."""
        await self._slots.take(tool, limit, call, process)

    async def give_slot(self, tool: str, call: str) -> None:
        """See :meth:`SlotTable.give`."""
        self._slots.give(tool, call)

    async def lose_process(self, process: str) -> None:
        """See :meth:`SlotTable.lose`."""
        self._slots.lose(process)


class RaySlots:
    """At most ``number`` calls of a tool at once in all processes of a run, on all machines.

    The router counts them, by a message before a call and one after it.
    """

    def __init__(self, router: ActorHandle, process: str, tool: str, limit: int) -> None:
        self._router, self._process, self._tool, self._limit = router, process, tool, limit

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Hold one slot."""
        call = uuid.uuid4().hex
        grant = self._router.take_slot.remote(self._tool, self._limit, call, self._process)
        try:
            await asyncio.wrap_future(grant.future())
            yield
        finally:
            self._router.give_slot.remote(self._tool, call)


class WorkerActor(RouterActor):
    """An :class:`AgentLoopWorker` in a process of its own, which ``process`` names, with the router of its requests."""

    def __init__(
        self, config: PPOConfig, router: ActorHandle, process: str, import_path: Sequence[str], index: int
    ) -> None:
        rollout = config.actor_rollout_ref.rollout
        super().__init__(rollout.max_num_seqs, index=index)
        # Agent loops live where the driver finds them.
        sys.path.extend(path for path in import_path if path not in sys.path)
        prepare_process()
        model = config.actor_rollout_ref.model
        tokenizer = tokenizer_of(model)
        processor = hf_processor(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        count_by(partial(RaySlots, router, process))
        self._connection = ImageConnection(self.router)
        router_here = self.router
        self._worker = AgentLoopWorker(config, tokenizer, processor, self._connection, lambda: router_here.asleep_s)
        self._columns = SequenceColumns(rollout, tokenizer, processor)
        self._under_way: dict[int, asyncio.Task[TrajectoryResult]] = {}
        self._ended: dict[int, Ended] = {}

    async def open(self, round_index: int, engines: int, other_routers: Mapping[int, ActorHandle]) -> None:
        """See :meth:`RouterActor.open`."""
        self._connection.loop = asyncio.get_running_loop()  # the constructor runs in none
        await super().open(round_index, engines, other_routers)

    async def run(self, key: int, trajectory: Trajectory) -> TrajectoryResult:
        """Run a trajectory to its end; its tokens stay here under its key until :meth:`hand_in` or :meth:`drop`."""
        task = self._under_way[key] = asyncio.create_task(self._run(key, trajectory))
        try:
            return await task
        finally:
            del self._under_way[key]

    async def _run(self, key: int, trajectory: Trajectory) -> TrajectoryResult:
        await self.round_opened(1)  # before the first one requests are refused; between later ones they wait
        # Where they lie on another machine they take time, and this thread serves other trajectories too.
        await asyncio.gather(*(asyncio.to_thread(value.arrays) for value in shared_of(trajectory)))
        with ExitStack() as on_failure:
            on_failure.callback(self._worker.forget, trajectory)  # if it is cancelled, for example
            result = await self._worker.run(trajectory)
            on_failure.pop_all()
        self._ended[key] = trajectory, result
        return replace(result, outputs=tuple(map(without_tokens, result.outputs)))

    async def hand_in(self, keys: Sequence[int]) -> DataProto:
        """Return the columns of trajectories that have ended, in the order of the keys, and forget them."""
        return self._columns.to_batch([self._taken(key) for key in keys])

    def _taken(self, key: int) -> Ended:
        ended = self._ended.pop(key)
        self._worker.forget(ended[0])
        return ended

    async def partial_responses(self) -> DataProto:
        """See :meth:`AgentLoopWorker.partial_responses`."""
        return to_batch(self._worker.partial_responses(self.router.partial_responses()))

    async def drop(self, keys: Sequence[int]) -> None:
        """End trajectories that nobody wants any more, and forget those that have ended."""
        for key in keys:
            if key in self._under_way:
                self._under_way[key].cancel()
            if key in self._ended:
                self._taken(key)

    async def report(self) -> tuple[int, TrajectoryProgress]:
        """Return the number of threads that do not end, and what the trajectories are doing."""
        progress = self._worker.progress(self.router.waiting)
        return self._worker.abandoned, replace(progress, placeless=len(self._under_way) - progress.running)


class RayAgents:
    """Runs trajectories in Ray actors, which start with the first trajectories and stay for the run.

    Args:
        config: the whole configuration.
        columns: makes the columns of trajectories that no process could run to their end.
    """

    def __init__(self, config: PPOConfig, columns: SequenceColumns) -> None:
        self._config, self._columns = config, columns
        rollout = config.actor_rollout_ref.rollout
        self._session = RaySession("agent loops", rollout.max_num_seqs, rollout.agent.hang_timeout_s, AgentRouter)
        self._session_lock = threading.RLock()
        """Held by a thread that changes the session: the one that serves, or one that replaces a worker."""
        self._processes: dict[WatchedActor, tuple[str, int]] = {}
        """The name of each worker's process, and the number of its router."""
        self._is_over = False
        self.has_ended = False
        """See :attr:`verl.agents.manager.Agents.has_ended`."""
        self._polling = Polling()
        self.thread = LoopThread("agent loops")
        self._workers = AgentProcesses(rollout, self._started, self._joined, self._ended)

    async def run(self, trajectories: Sequence[Trajectory]) -> tuple[list[TrajectoryResult], DataProto]:
        """See :meth:`verl.agents.manager.Agents.run`."""
        if not self._processes:
            cores = int(ray.cluster_resources().get("CPU", 1))
            count = self._config.actor_rollout_ref.rollout.agent.num_workers
            self._workers.start(max(1, min(count, cores)))
        return await TrajectoryRun(self._workers, self._columns, trajectories).ended()

    async def partial_responses(self) -> list[DataProto]:
        """See :meth:`verl.agents.manager.Agents.partial_responses`."""
        return await self._workers.partial_responses()

    def serve_until(self, group: WorkerGroup, is_enough: Callable[[], bool]) -> None:
        """See :meth:`verl.agents.manager.AgentLoopManager.serve_until`."""
        with ExitStack() as on_failure:
            on_failure.callback(self.shutdown)  # neither the ranks nor the trajectories may go on
            try:
                with ExitStack() as served:
                    with self._session_lock:
                        served.enter_context(self._session.awake(group, keeps_requests=True))
                        self._session.resume()
                    self._polling.until(is_enough, self._check)
                    with self._session_lock:
                        self._session.interrupt()
                        served.pop_all().close()
            except ProcessLostError:
                on_failure.pop_all()
                if not self._session.has_router:
                    self.has_ended = True
                    self.thread.clear(lambda _: None)
                raise
            on_failure.pop_all()

    def _check(self) -> None:
        self._workers.raise_failure()
        with self._session_lock:
            self._session.check(self._workers.silences())

    def notify(self) -> None:
        """See :meth:`verl.agents.manager.Agents.notify`."""
        self._polling.notify()

    def progress(self) -> TrajectoryProgress:
        """See :meth:`verl.agents.manager.AgentLoopManager.progress`."""
        return self._workers.progress()

    # ---- workers; called in the event loop or, where they wait, in other threads

    def _started(self) -> WatchedActor:
        """Start a worker, which takes trajectories at once, and begins them when it has joined the session."""
        with self._session_lock:
            if self._is_over:
                raise WorkerError("the agent loops have been shut down.")
            router, index = self._session.router.actor, self._session.new_index()
        limit_s = self._config.actor_rollout_ref.rollout.agent.hang_timeout_s
        process = uuid.uuid4().hex
        arguments = self._config, router, process, sys.path, index
        worker = WatchedActor("a process of agent loops", WorkerActor, "silences", limit_s, *arguments)
        self._processes[worker] = process, index
        return worker

    def _joined(self, worker: WatchedActor) -> None:
        """Let the ranks fetch the requests of a worker that has started."""
        with self._session_lock:
            if worker in self._processes:
                self._session.add(self._processes[worker][1], worker)

    def _ended(self, worker: WatchedActor) -> None:
        """End a worker, and give back the slots of tools that it holds."""
        worker.end()
        with self._session_lock:
            if worker in self._processes:
                process, index = self._processes.pop(worker)
                self._session.remove(index)
                self._session.router.actor.lose_process.remote(process)

    @property
    def weight_version(self) -> int:
        """See :attr:`verl.agents.manager.AgentLoopManager.weight_version`."""
        return self._session.weight_version

    def shutdown(self) -> None:
        """End all processes, and cancel what runs; there can be no later :meth:`run`."""
        self.has_ended = True
        self.thread.stop()
        with self._session_lock:
            self._is_over = True
            workers = list(self._processes)
            self._processes.clear()
            if ray.is_initialized():
                for worker in workers:
                    worker.end()
            self._session.close()
