"""Metrics, tables, times and FLOPs that a step collects beside its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from verl.utils.console import showing_stage
from verl.utils.metric import Metrics, simple_timer
from verl.utils.run_log import STAGE_NOTE, clock


@dataclass
class StepContext:
    """Metrics, times and FLOPs of one step.

    Example:
        >>> context = StepContext(number=1)
        >>> with context.stage("gen"):
        ...     pass
        >>> list(context.seconds)
        ['gen']
    """

    number: int
    """The step, counted from 1; 0 before the first one."""
    metrics: Metrics = field(default_factory=dict)
    tables: dict[str, tuple[list[str], list[list[object]]]] = field(default_factory=dict)
    """Names of columns and rows by the name of the table."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock time by stage."""
    flops: dict[str, float | None] = field(default_factory=dict)
    """Useful floating-point operations by stage, over all ranks; None where they are not known."""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, begin and end of each stage in the order of their ends, in seconds since 1970."""
    observe: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Makes what is entered for the duration of each stage, from its name."""
    is_shown: bool = True
    """True if a progress display names the stages; not those of a thread beside the step."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a part of the step, and add its name and the step's number as a note to an error raised inside.

        Times of a stage that is entered twice are summed. With nested stages the note names the innermost one.
        """
        began = clock()
        with (
            self.observe(name),
            showing_stage(name) if self.is_shown else nullcontext(),
            simple_timer(name, self.seconds),
        ):
            try:
                yield
                self.spans.append((name, round(began, 4), round(clock(), 4)))
            except Exception as error:  # a stage raises anything; raised again with a note
                if not any(note.startswith(STAGE_NOTE) for note in getattr(error, "__notes__", ())):
                    error.add_note(f"{STAGE_NOTE} '{name}' of step {self.number}.")
                raise
