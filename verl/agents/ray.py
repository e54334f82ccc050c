"""Agent loops in processes of their own, for ``trainer.controller=ray``.

::

    driver ── trajectories ──► worker 0 … worker n     one actor each; trajectories in threads, with a router
                                   │ requests, fetched by the ranks
                                   ▼
                                engine 0 … engine m    the ranks' rollout engines

Tokens stay with the worker that ran a trajectory. At the end of a rollout it pads them to columns, which lie in Ray's
object store as those of the ranks do (:mod:`verl.protocol.stored`); the driver learns how each trajectory ended.

A worker that dies, or does not answer for ``rollout.agent.hang_timeout_s``, is replaced, and its trajectories are
run again from their beginning with the same random numbers, also those that had ended
(:mod:`verl.agents.ray_trajectories`). The driver's router (:mod:`verl.serving.ray`), which counts calls of tools too,
is lost with the ranks if it does so, as a rank is.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayActorError

from verl.agents.columns import Ended, SequenceColumns
from verl.agents.outputs import without_tokens
from verl.agents.ray_trajectories import RunningTrajectories, shared_of
from verl.agents.slots import SlotTable, count_by
from verl.agents.worker import AgentLoopWorker, Trajectory, TrajectoryResult
from verl.base.import_utils import prepare_process
from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.serving.ray import ImageConnection, RaySession, RouterActor
from verl.single_controller.ray.private import brief
from verl.single_controller.ray.watched_actor import ActorSilentError, WatchedActor
from verl.utils.tokenizer import hf_processor, hf_tokenizer

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from verl.single_controller.base.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


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
        self._router, self._process, self._tool, self._number = router, process, tool, limit

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Hold one slot."""
        call = uuid.uuid4().hex
        asked = self._router.take_slot.remote(self._tool, self._number, call, self._process)
        try:
            await asyncio.wrap_future(asked.future())
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
        path, trusts = model.tokenizer_path or model.path, model.trust_remote_code
        tokenizer = hf_tokenizer(path, trust_remote_code=trusts, chat_template=model.custom_chat_template)
        processor = hf_processor(path, trust_remote_code=trusts)
        count_by(partial(RaySlots, router, process))
        self._connection = ImageConnection(self.router)
        self._worker = AgentLoopWorker(config, tokenizer, processor, self._connection)
        self._columns = SequenceColumns(rollout, tokenizer, processor)
        self._ended: dict[int, Ended] = {}

    async def open(self, round_index: int, engines: int, others: Mapping[int, ActorHandle]) -> None:
        """See :meth:`RouterActor.open`."""
        self._connection.loop = asyncio.get_running_loop()  # the constructor runs in none
        await super().open(round_index, engines, others)

    async def run(self, trajectory_index: int, trajectory: Trajectory, round_index: int) -> TrajectoryResult:
        """Run a trajectory to its end; its tokens stay here under its number until :meth:`hand_in`."""
        await self.round_opened(round_index)
        # Where they lie on another machine they take time, and this thread serves other trajectories too.
        await asyncio.gather(*(asyncio.to_thread(value.arrays) for value in shared_of(trajectory)))
        result = await self._worker.run(trajectory)
        self._ended[trajectory_index] = trajectory, result
        return replace(result, outputs=tuple(map(without_tokens, result.outputs)))

    async def hand_in(self, numbers: Sequence[int]) -> DataProto:
        """Return the columns of trajectories that have ended, in the order of the numbers, and forget them."""
        return self._columns.of([self._ended.pop(trajectory_index) for trajectory_index in numbers])

    async def abandoned(self) -> int:
        """Return the number of threads that do not end."""
        return self._worker.abandoned


class RayAgents:
    """Runs trajectories in Ray actors, which start with the first rollout and stay for the run.

    Args:
        config: the whole configuration.
        columns: makes the columns of trajectories that no process could run to their end.
    """

    def __init__(self, config: PPOConfig, columns: SequenceColumns) -> None:
        self._config, self._columns = config, columns
        rollout = config.actor_rollout_ref.rollout
        self._session = RaySession("agent loops", rollout.max_num_seqs, rollout.agent.hang_timeout_s, AgentRouter)
        self._workers: list[WatchedActor] = []
        self._processes: dict[WatchedActor, tuple[str, int]] = {}
        """The name of each worker's process, and the number of its router."""

    def run(self, trajectories: Sequence[Trajectory], group: WorkerGroup) -> tuple[list[TrajectoryResult], DataProto]:
        """See :meth:`verl.agents.manager.Agents.run`.

        Raises:
            ProcessLostError: a rank or the router died or hangs.
            WorkerError: an engine failed, or a process of agent loops cannot start.
        """
        rollout = self._config.actor_rollout_ref.rollout
        with ExitStack() as on_failure:
            on_failure.callback(self.shutdown)  # neither the ranks nor the trajectories may go on
            if not self._workers:
                cores = int(ray.cluster_resources().get("CPU", 1))
                self._workers = [self._new_worker() for _ in range(max(1, min(rollout.agent.num_workers, cores)))]
            with self._session.awake(group):
                running = RunningTrajectories(
                    *(rollout, self._columns, trajectories, self._workers),
                    replacement=self._replacement,
                    round_index=self._session.round_index,
                )
                while not running.look():
                    self._session.check(running.silences)
            self._replace_stuck_workers()
            on_failure.pop_all()
        return running.results, running.columns

    def _new_worker(self) -> WatchedActor:
        limit_s = self._config.actor_rollout_ref.rollout.agent.hang_timeout_s
        process, index = uuid.uuid4().hex, self._session.new_index()
        arguments = self._config, self._session.router.actor, process, sys.path, index
        worker = WatchedActor("a process of agent loops", WorkerActor, "silences", limit_s, *arguments)
        self._processes[worker] = process, index
        self._session.add(index, worker)
        return worker

    def _replacement(self, worker: WatchedActor) -> WatchedActor:
        """End a worker, give back the slots of tools that it holds, and start another one."""
        worker.end()
        process, index = self._processes.pop(worker)
        self._session.remove(index)
        self._session.router.actor.lose_process.remote(process)
        return self._new_worker()

    def _replace_stuck_workers(self) -> None:
        asked = [worker.actor.abandoned.remote() for worker in self._workers]
        for slot, (worker, reference) in enumerate(zip(list(self._workers), asked, strict=True)):
            try:
                count = worker.result(reference)
            except (ActorSilentError, RayActorError) as error:
                logger.warning("a process of agent loops is replaced: %s", brief(str(error)))
            else:
                if not count:
                    continue
                logger.warning("%d agent loop(s) do not end; their process is replaced", count)
            self._workers[slot] = self._replacement(worker)

    def shutdown(self) -> None:
        """End all processes. A later :meth:`run` starts new ones."""
        workers, self._workers = self._workers, []
        self._processes.clear()
        if ray.is_initialized():
            for worker in workers:
                worker.end()
        self._session.close()
