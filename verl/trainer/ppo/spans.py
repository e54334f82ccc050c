"""Code shared by the exporters of spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

Interval = tuple[float, float]
"""Begin and end in seconds since 1970."""


@dataclass
class PlannedSpan:
    """A span to be made, with those inside of it."""

    name: str
    interval: Interval
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    parts: list[PlannedSpan] = field(default_factory=list)

    @property
    def nanoseconds(self) -> tuple[int, int]:
        """Begin and end in integers; a clock that was set back makes no negative span."""
        begin, end = (int(seconds * 1e9) for seconds in self.interval)
        return begin, max(begin, end)


class SpanSender(Protocol):
    """Sends traces somewhere, in a thread of its own; what it cannot deliver is lost, with a line in the log."""

    def send(self, root: PlannedSpan) -> None:
        """Send a span with those inside of it as a trace of its own."""

    def close(self) -> None:
        """Send what is left, and end the thread."""
