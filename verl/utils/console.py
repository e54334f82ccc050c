"""What a run says to the person in front of it: a live display on a terminal, plain lines in a log.

This is the only module that writes to standard output.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

logger = logging.getLogger(__name__)

LOG_WIDTH = 120
"""Columns of a table in a log file."""

RECENT_STEPS = 20
"""Steps whose pace predicts the time left."""

SHOWN = (
    ("reward", ("critic/score/mean", "critic/rewards/mean"), ".3f"),
    ("loss", ("train/loss",), ".4f"),
    ("length", ("response_length/mean",), ".1f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("grad", ("actor/grad_norm", "train/grad_norm"), ".3g"),
    ("tokens/s", ("perf/throughput",), ",.0f"),
)
"""What the live display shows of a step: label, the metrics that may give it, format."""

_live: Progress | None = None


class _Output(Console):
    """Standard output of a run, which outlives whoever reads it."""

    def on_broken_pipe(self) -> None:
        """The reader has gone (``... | head``). Rich would end the process."""
        self.quiet = True
        error = sys.exc_info()[1]
        if error is not None:
            raise error


def console() -> Console:
    """Standard output as it is now: a terminal with its width, or a log of ``LOG_WIDTH`` columns."""
    plain = _Output()
    return plain if plain.is_terminal else _Output(width=LOG_WIDTH)


_is_lost = False


@contextmanager
def _spared() -> Iterator[None]:
    """Nothing that is shown is worth a run: a full disk behind the output, or a reader that has gone, is said once."""
    global _is_lost
    try:
        yield
    except OSError as error:
        if not _is_lost:
            _is_lost = True
            logger.warning("standard output cannot be written (%s); the run goes on without what it would show.", error)
            atexit.register(_let_go)


def _let_go() -> None:
    """Python flushes the output when it ends, and would make a failure the exit status of the run."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(content: RenderableType) -> None:
    """Write a table or a text, above the live display if there is one."""
    if isinstance(content, str):
        content = Text(content)
    with _spared():
        (_live.console if _live else console()).print(content, soft_wrap=isinstance(content, Text))


def write_line(text: str) -> None:
    """Write one line of a log, unwrapped; nothing while a live display shows the run instead."""
    if _live is None:
        with _spared():
            console().out(text, highlight=False)


def metrics_line(step: int, metrics: Mapping[str, Any]) -> str:
    """``step:12 - actor/pg_loss:0.1 - critic/score/mean:0.5``: six digits of each number, integers whole."""
    parts = [f"step:{step}"]
    for name, value in metrics.items():
        parts.append(f"{name}:{value:.6g}" if isinstance(value, float) else f"{name}:{value}")
    return " - ".join(parts)


class Progress:
    """Live progress of a run on a terminal: steps, time left, and the numbers that matter.

    ::

        step 12  reward 0.431  length 118.2  entropy 0.512  grad 0.31  tokens/s 4,210  9.8 s
        ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  12/100 steps  2:10 gone  14:23 left  val 0.480

    One line stays for each step; the bar below them moves. Without a terminal it shows nothing, and
    the ``console`` tracker writes a line per step instead.

    Args:
        total_steps: last step of the run.
        first_step: step that the run starts (or resumes) from.
        enabled: ``auto`` on a terminal only; ``on`` always; ``off`` never.
        console: where to draw; standard output by default.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        enabled: Literal["auto", "on", "off"] | bool = "auto",
        console: Console | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.step = first_step
        wanted = {True: "on", False: "off"}.get(enabled, enabled) if isinstance(enabled, bool) else enabled
        self.console = console or _Output(force_terminal=True if wanted == "on" else None)
        self.is_shown = wanted == "on" or (wanted == "auto" and self.console.is_terminal)
        self._started = time.monotonic()
        self._finished_at: deque[float] = deque([self._started], maxlen=RECENT_STEPS + 1)
        self._validation = ""
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=2)

    def __enter__(self) -> Progress:
        global _live
        self._started = time.monotonic()
        self._finished_at.clear()
        self._finished_at.append(self._started)
        if self.is_shown:
            with _spared():
                self._live.start()
            _live = self
        return self

    def __exit__(self, *error: object) -> None:
        global _live
        if self.is_shown:
            _live = None
            with _spared():
                self._live.stop()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done."""
        now = time.monotonic()
        seconds = now - self._finished_at[-1]
        self.step = step
        self._finished_at.append(now)
        self._validation = _validation_text(metrics) or self._validation
        if self.is_shown:
            with _spared():
                self.console.print(_step_text(step, metrics, seconds), soft_wrap=True)

    def message(self, text: str) -> None:
        """A line for the person, above the bar; on a log, just a line."""
        with _spared():
            if self.is_shown:
                self.console.print(Text(text), soft_wrap=True)
            else:
                console().out(text, highlight=False)

    def seconds_left(self) -> float:
        """Time to the last step at the pace of the recent ones; NaN before the first is done."""
        steps = len(self._finished_at) - 1
        if steps == 0:
            return math.nan
        pace = (self._finished_at[-1] - self._finished_at[0]) / steps
        since = time.monotonic() - self._finished_at[-1]
        return max(0.0, pace * (self.total_steps - self.step) - since)

    def _render(self) -> RenderableType:
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self.total_steps, 1), completed=self.step, width=36)
        gone, left = clock(time.monotonic() - self._started), clock(self.seconds_left())
        steps = Text(f"{self.step}/{self.total_steps} steps", style="bold")
        line.add_row(bar, steps, Text(f"{gone} gone"), Text(f"{left} left"), Text(self._validation, style="green"))
        return Group(line)


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``; ``-:--`` for an unknown time."""
    if math.isnan(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _step_text(step: int, metrics: Mapping[str, Any], seconds: float) -> Text:
    text = Text(f"step {step}", style="bold")
    for label, names, form in SHOWN:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            text.append(f"  {label} ", style="dim").append(format(float(value), form), style="not bold")
    return text.append(f"  {seconds:.1f} s", style="dim")


def _validation_text(metrics: Mapping[str, Any]) -> str:
    """The core validation numbers (mean@N of each data source), or the validation loss."""
    means = {name: value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name}
    if means:
        return "  ".join(f"val {name.split('/')[1]} {value:.3f}" for name, value in means.items())
    return f"val loss {metrics['val/loss']:.4f}" if "val/loss" in metrics else ""
