"""Agent loops in the trainer's own process, for ``trainer.controller=local``.

The engine serves in the main thread; trajectories, and the router between them, run beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl.agents.columns import SequenceColumns
from verl.agents.worker import AgentLoopWorker, Trajectory, TrajectoryResult
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
        self._thread = LoopThread("agent loops")
        self._session = LocalSession(config.actor_rollout_ref.rollout.max_num_seqs, self._thread.loop)
        self._worker = AgentLoopWorker(config, tokenizer, processor, self._session)

    def run(self, trajectories: Sequence[Trajectory], group: WorkerGroup) -> tuple[list[TrajectoryResult], DataProto]:
        """See :meth:`verl.agents.manager.Agents.run`."""
        results = self._session.serve_while(group, lambda: self._thread.submit(self._all(trajectories))).result()
        return results, self._columns.of(zip(trajectories, results, strict=True))

    async def _all(self, trajectories: Sequence[Trajectory]) -> list[TrajectoryResult]:
        running = [asyncio.create_task(self._worker.run(trajectory)) for trajectory in trajectories]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()  # does nothing unless another one raised

    def shutdown(self) -> None:
        """End the event loop and what trajectories have shared; there can be no later :meth:`run`."""
        self._worker.close()
        self._thread.stop()
