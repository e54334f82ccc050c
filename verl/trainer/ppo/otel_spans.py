"""Spans by OpenTelemetry's SDK, to the collector that ``OTEL_EXPORTER_OTLP_ENDPOINT`` and its relatives name."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Status, StatusCode

from verl.trainer.ppo.spans import PlannedSpan

_QUEUE = 2**17
"""Spans that wait for the exporter; those of a step come at once."""


class OtelSpans:
    """See :class:`verl.trainer.ppo.spans.SpanSender`."""

    def __init__(self, project: str, experiment: str) -> None:
        about = {"service.name": "verl", "verl.project": project, "verl.experiment": experiment}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=_QUEUE))
        self._tracer = self._provider.get_tracer("verl")

    def send(self, root: PlannedSpan) -> None:
        """Make the spans from the outermost on."""
        self._send(root, None)

    def close(self) -> None:
        """Wait for the exporter."""
        self._provider.shutdown()

    def _send(self, part: PlannedSpan, parent: Span | None) -> None:
        begin, end = part.nanoseconds
        context = None if parent is None else trace.set_span_in_context(parent)
        span = self._tracer.start_span(part.name, context, start_time=begin, attributes=part.attributes)
        if part.error:
            span.set_status(Status(StatusCode.ERROR, part.error))
        for inner in part.parts:
            self._send(inner, span)
        span.end(end)
