"""Export metrics (``rollout.prometheus``) and spans (``rollout.trace``) of a run while it trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.driver import load_controller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from verl.single_controller.base.board import Board
    from verl.single_controller.base.worker_group import WorkerGroup
    from verl.tracking.prometheus import MetricsServer
    from verl.trainer.ppo.tracing import RolloutTraces
    from verl.utils.step_context import StepContext


class Observers:
    """The server of metrics and the exporter of spans, as far as the configuration asks for them.

    Args:
        config: ``actor_rollout_ref.rollout.prometheus`` and ``.trace``, and the names of the run.
        tokenizer: for the texts of spans.
        total_steps: steps of the run.
    """

    def __init__(self, config: PPOConfig, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> None:
        rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
        self._controller = trainer.controller
        self._server: MetricsServer | None = None
        self._traces: RolloutTraces | None = None
        self._board: Board | None = None
        if rollout.prometheus.enable:
            from verl.tracking.prometheus import MetricsServer  # needs the extra `prometheus`

            self._server = MetricsServer(rollout.prometheus, trainer.project_name, trainer.experiment_name)
            self._server.total_steps = total_steps
        if rollout.trace.backend is not None:
            from verl.trainer.ppo.tracing import RolloutTraces

            self._traces = RolloutTraces(config, tokenizer)

    @property
    def stage(self) -> Callable[[str], AbstractContextManager[object]]:
        """Show a stage of a step while it runs."""
        return nullcontext if self._server is None else self._server.stage

    def watch(self, workers: WorkerGroup) -> None:
        """Let the ranks of a worker group post the states of their engines."""
        if self._server is not None:
            board: Board = load_controller(self._controller).Board()
            self._board = board
            workers.post_engine_state(board)
            self._server.engine_states = board.values

    def unwatch(self) -> None:
        """Close the board to which the ranks post."""
        if self._server is not None:
            self._server.engine_states = dict
        if self._board is not None:
            self._board.close()
            self._board = None

    def trace(self, batches: Sequence[DataProto], context: StepContext) -> None:
        """Send the spans of all responses of a step."""
        if self._traces is not None:
            with context.stage("trace_rollouts"):
                self._traces.write(context.number, batches, context.spans)

    def close(self) -> None:
        """Send the rest of the spans and stop listening for scrapes."""
        if self._traces is not None:
            self._traces.close()
            self._traces = None
        if self._server is not None:
            self._server.close()
            self._server = None
