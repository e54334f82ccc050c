"""Agent loops in the trainer's own process, for ``trainer.controller=local``.

The engine serves in the main thread, as long as :meth:`LocalAgents.serve_until` has it; trajectories, and the router
between them, run beside it, also while the engine sleeps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl.agents.columns import SequenceColumns
from verl.agents.partial_responses import to_batch
from verl.agents.polling import Polling
from verl.agents.worker import AgentLoopWorker, Trajectory, TrajectoryProgress, TrajectoryResult
from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.serving.local import LocalSession
from verl.tools.threads import LoopThread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.single_controller.base.worker_group import WorkerGroup


class LocalAgents:
    """Runs trajectories on an event loop beside the main thread.

    Args:
        config: the whole configuration.
        columns: makes the columns of sequences.
        tokenizer: the policy's.
        processor: the multi-modal processor, if the model has one.
    """

    def __init__(
        self,
        config: PPOConfig,
        columns: SequenceColumns,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None,
    ) -> None:
        self._columns = columns
        self.thread = LoopThread("agent loops")
        self._polling = Polling()
        self._session = LocalSession(config.actor_rollout_ref.rollout.max_num_seqs, self.thread.loop)
        self._session.pause()  # until an engine serves
        router = self._session.router
        self._worker = AgentLoopWorker(config, tokenizer, processor, self._session, lambda: router.asleep_s)

    async def run(self, trajectories: Sequence[Trajectory]) -> tuple[list[TrajectoryResult], DataProto]:
        """See :meth:`verl.agents.manager.Agents.run`."""
        running = [asyncio.create_task(self._worker.run(trajectory)) for trajectory in trajectories]
        try:
            results = await asyncio.gather(*running)
            return results, await asyncio.to_thread(
                self._columns.to_batch, list(zip(trajectories, results, strict=True))
            )
        finally:
            for task in running:
                task.cancel()  # does nothing unless another one raised
            for trajectory in trajectories:
                self._worker.forget(trajectory)

    async def partial_responses(self) -> list[DataProto]:
        """See :meth:`verl.agents.manager.Agents.partial_responses`."""
        return [to_batch(self._worker.partial_responses(self._session.router.partial_responses()))]

    def serve_until(self, group: WorkerGroup, is_enough: Callable[[], bool]) -> None:
        """See :meth:`verl.agents.manager.AgentLoopManager.serve_until`."""
        is_over = threading.Event()

        def serve() -> None:
            self._session.resume()
            try:
                self._polling.until(lambda: is_over.is_set() or is_enough())
            finally:
                self._session.interrupt()

        try:
            self._session.serve_while(group, lambda: self.thread.submit(asyncio.to_thread(serve))).result()
        finally:
            is_over.set()
            self.notify()

    def notify(self) -> None:
        """See :meth:`verl.agents.manager.Agents.notify`."""
        self._polling.notify()

    def progress(self) -> TrajectoryProgress:
        """See :meth:`verl.agents.manager.AgentLoopManager.progress`."""
        return self._worker.progress(self._session.router.waiting)

    @property
    def weight_version(self) -> int:
        """See :attr:`verl.agents.manager.AgentLoopManager.weight_version`."""
        return self._session.weight_version

    @property
    def has_ended(self) -> bool:
        """See :attr:`verl.agents.manager.Agents.has_ended`; the router is lost with this process alone."""
        return False

    def shutdown(self) -> None:
        """End the event loop, trajectories under way, and what they have shared."""
        self._worker.close()
        self.thread.stop()
