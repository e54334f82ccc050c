"""Spans by MLflow's client, into the experiment of the run at ``MLFLOW_TRACKING_URI``, where its page shows traces."""

from __future__ import annotations

from typing import Any

import mlflow
from mlflow.entities import LiveSpan, SpanStatus, SpanStatusCode, SpanType
from mlflow.exceptions import MlflowException

from verl.errors import ConfigError
from verl.trainer.ppo.spans import PlannedSpan

_TYPES = {
    "trajectory": SpanType.AGENT,
    "turn": SpanType.CHAIN,
    "generation": SpanType.LLM,
    "tool_call": SpanType.TOOL,
    "environment": SpanType.TOOL,
    "reward": SpanType.EVALUATOR,
}
_INPUTS, _OUTPUTS = ("verl.prompt",), ("verl.response", "verl.content")


class MlflowSpans:
    """See :class:`verl.trainer.ppo.spans.SpanSender`.

    Raises:
        ConfigError: the experiment can neither be found nor made.
    """

    def __init__(self, project: str, experiment: str) -> None:
        try:
            experiment_found = mlflow.get_experiment_by_name(project)
            experiment_id = experiment_found.experiment_id if experiment_found else mlflow.create_experiment(project)
        except MlflowException as error:
            raise ConfigError(
                f"rollout.trace.backend=mlflow: the experiment '{project}' cannot be opened at "
                f"{mlflow.get_tracking_uri()} ({error}). Set MLFLOW_TRACKING_URI, or start its server."
            ) from error
        self._trace_settings: dict[str, Any] = {"experiment_id": experiment_id, "tags": {"verl.experiment": experiment}}

    def send(self, root: PlannedSpan) -> None:
        """Make the spans from the outermost on; the client sends a trace once that one has ended."""
        self._send(root, None)

    def close(self) -> None:
        """Wait for the client's thread."""
        mlflow.flush_trace_async_logging(terminate=True)

    def _send(self, part: PlannedSpan, parent: LiveSpan | None) -> None:
        begin, end = part.nanoseconds
        inputs = {name.removeprefix("verl."): part.attributes[name] for name in _INPUTS if name in part.attributes}
        outputs = next((part.attributes[name] for name in _OUTPUTS if name in part.attributes), None)
        span = mlflow.start_span_no_context(
            part.name,
            span_type=_TYPES.get(part.name, SpanType.UNKNOWN),
            parent_span=parent,
            inputs=inputs or None,
            attributes={name: value for name, value in part.attributes.items() if name not in (*_INPUTS, *_OUTPUTS)},
            start_time_ns=begin,
            **(self._trace_settings if parent is None else {}),
        )
        for inner in part.parts:
            self._send(inner, span)
        status = SpanStatus(SpanStatusCode.ERROR, part.error) if part.error else SpanStatus(SpanStatusCode.OK)
        span.end(outputs=outputs, status=status, end_time_ns=end)
