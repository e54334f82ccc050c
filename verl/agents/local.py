"""Agent loops in the trainer's own process, for ``trainer.controller=local``.

The engine serves in the main thread; trajectories, and the router between them, run beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

from verl.agents.columns import SequenceColumns
from verl.agents.worker import AgentLoopWorker, Trajectory, TrajectoryResult
from verl.config import PPOConfig
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.serving.router import Router
from verl.tools.threads import LoopThread
from verl.workers.rollout.request import DrawnPart, RolloutOutput, RolloutRequest
from verl.workers.rollout.request_queue import RequestQueue


class LocalRequests:
    """Requests to the one engine here; see :class:`verl.workers.rollout.request_queue.EngineRequests`."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue

    @contextmanager
    def of_engine(self, number: int) -> Iterator[RequestQueue]:
        """Yield the queue."""
        yield self._queue


class LocalCall:
    """A request under way; see :class:`verl.agents.servers.GenerationCall`."""

    def __init__(self, future: Future[RolloutOutput] | asyncio.Future[RolloutOutput]) -> None:
        self._future = future

    def future(self) -> Future[RolloutOutput] | asyncio.Future[RolloutOutput]:
        """Return what becomes of it."""
        return self._future

    def cancel(self) -> None:
        """Withdraw it."""
        self._future.cancel()


class LocalAgents:
    """Runs trajectories on an event loop beside the main thread.

    Args:
        config: the whole configuration.
        columns: makes the columns of sequences.
        tokenizer: the policy's.
        processor: the multi-modal processor, if the model has one.
    """

    def __init__(self, config: PPOConfig, columns: SequenceColumns, tokenizer: Any, processor: Any) -> None:
        self._columns = columns
        self._room = config.actor_rollout_ref.rollout.max_num_seqs
        self._router: Router | None = None
        self._worker = AgentLoopWorker(config, tokenizer, processor, self)
        self._thread = LoopThread("agent loops")
        self._loop = self._thread.loop

    def send(
        self, conversation: str, request: RolloutRequest, on_part: Callable[[DrawnPart], object] | None = None
    ) -> LocalCall:
        """Send a request to the engine, from any thread."""
        router = self._router
        if router is None:
            raise RolloutError("no rollout is running, so no engine answers.")
        generating = router.generate(conversation, request, on_part)
        if self._thread.is_current:
            return LocalCall(self._loop.create_task(generating))
        return LocalCall(asyncio.run_coroutine_threadsafe(generating, self._loop))

    def end(self, conversation: str) -> None:
        """Do nothing: images lie in this process, and belong to their conversation alone."""

    def run(self, trajectories: Sequence[Trajectory], group: Any) -> tuple[list[TrajectoryResult], DataProto]:
        """See :meth:`verl.agents.manager.Agents.run`."""
        queue = RequestQueue(lambda number, answer: self._loop.call_soon_threadsafe(router.take_answer, number, answer))
        self._router = router = Router([queue], self._room)
        running = asyncio.run_coroutine_threadsafe(self._all(trajectories, router), self._loop)
        with ExitStack() as stack:
            stack.callback(self._end, router)
            stack.callback(running.cancel)  # does nothing once all have ended
            with group.limit_silence(router.silent_s):
                group.serve(LocalRequests(queue))
            results = running.result()
        return results, self._columns.of(zip(trajectories, results, strict=True))

    def _end(self, router: Router) -> None:
        self._loop.call_soon_threadsafe(router.close)
        self._router = None

    async def _all(self, trajectories: Sequence[Trajectory], router: Router) -> list[TrajectoryResult]:
        running = [asyncio.create_task(self._worker.run(trajectory)) for trajectory in trajectories]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()  # does nothing unless another one raised
            router.close()

    def shutdown(self) -> None:
        """End the event loop and what trajectories have shared; there can be no later :meth:`run`."""
        self._worker.close()
        self._thread.stop()
