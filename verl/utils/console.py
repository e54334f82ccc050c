"""Output of a run: a live display on a terminal, plain lines in a log.

Only this module writes to standard output.
"""

from __future__ import annotations

import atexit
import html
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from verl.base.streams import printable

logger = logging.getLogger(__name__)

LOG_WIDTH = 120  # characters per line of a table in a log file
REMINDERS_S = (3.0, 7.0, 20.0, 60.0)  # pauses before a long wait is told again; the last one repeats
RECENT_STEPS = 20  # number of steps from which the remaining time is estimated

# Metrics in the live display: label, the metric names of which the first present one is shown, format.
SHOWN = (
    ("reward", ("critic/score/mean", "critic/rewards/mean"), ".3f"),
    ("loss", ("train/loss", "actor/pg_loss"), ".4f"),
    ("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), ".4f"),
    ("ppo_kl", ("actor/ppo_kl",), ".2g"),
    ("length", ("response_length/mean",), ".1f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("grad", ("actor/grad_norm", "train/grad_norm"), ".3g"),
    ("tokens/s", ("perf/throughput",), ",.0f"),
)

_began = time.monotonic()  # a restarted driver is a fork of the command, and counts on
_run: Progress | None = None
_live: Progress | None = None


def restart_clock() -> None:
    """Let the times of :func:`status` begin now: a process of a user's may call several runs."""
    global _began
    _began = time.monotonic()


def parameters_in_words(count: int) -> str:
    """Return the size of a model in words.

    >>> parameters_in_words(7_615_616_512), parameters_in_words(4_100_352), parameters_in_words(13_104)
    ('7.62 billion parameters', '4.1 million parameters', '13,104 parameters')
    """
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.2f}".removesuffix("0").removesuffix(".0") + f" {name} parameters"
    return f"{count:,} parameters"


class _Output(Console):
    """Console on which texts are only text, and that does not end the process when its reader is gone."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as text; Rich would pass on the escape codes of texts that a model or a file wrote."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        """Raise the error again; Rich would end the process if the reader is gone (``... | head``)."""
        self.quiet = True
        error = sys.exc_info()[1]
        if error is not None:
            raise error


def console() -> Console:
    """Return a console on the current standard output: a terminal, or a log of ``LOG_WIDTH`` columns."""
    plain = _Output()
    return plain if plain.is_terminal else _Output(width=LOG_WIDTH)


_is_lost = False


@contextmanager
def _ignoring_write_errors() -> Iterator[None]:
    """Ignore errors in writing (full disk, reader gone), which must not end a run; warn of the first one."""
    global _is_lost
    try:
        yield
    except OSError as error:
        if not _is_lost:
            _is_lost = True
            logger.warning("standard output cannot be written (%s); the run goes on without what it would show.", error)
            atexit.register(_flush_at_exit)


def _flush_at_exit() -> None:
    """Flush standard output at exit, and redirect it to the null device if that fails."""
    # Otherwise Python flushes when it ends and turns a failure into the exit status of the run.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(content: RenderableType) -> None:
    """Print a table or a text, above the live display if there is one."""
    if isinstance(content, str):
        content = Text(content)
    with _ignoring_write_errors():
        (_live.console if _live else console()).print(content, soft_wrap=isinstance(content, Text))


class LogFormatter(logging.Formatter):
    """Gives log records the style of :func:`status`; a level other than INFO, and another library, are named."""

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        library = "" if record.name.startswith("verl") else f"{record.name}: "
        return f"{clock(time.monotonic() - _began)}  {level}{library}{super().format(record)}"


def status(text: str) -> None:
    """Say what the run does now, with the time since the command began: ``0:07  loading actor_rollout``."""
    show(Text(f"{clock(time.monotonic() - _began)}  {text}", style="dim"))


@contextmanager
def working(text: str) -> Iterator[None]:
    """Say what the block does, as :func:`status`; and while it takes long, say so again with growing pauses."""
    done = threading.Event()

    def remind() -> None:
        began, pauses = time.monotonic(), itertools.chain(REMINDERS_S, itertools.repeat(REMINDERS_S[-1]))
        while not done.wait(next(pauses)):
            status(f"still {text} ({time.monotonic() - began:.0f} s)")

    status(text)
    thread = threading.Thread(target=remind, name="verl-reminder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def write_step(step: int, metrics: Mapping[str, float]) -> None:
    """Write the line of a step: the metrics in ``SHOWN`` within a run, all of them outside of one.

    A run with a live display shows its steps itself.
    """
    if _live is None:
        show(metrics_line(step, metrics) if _run is None else _run.line(step, metrics))


def metrics_line(step: int, metrics: Mapping[str, float]) -> str:
    """Format metrics as ``step:12 - actor/pg_loss:0.1 - critic/score/mean:0.5``, floats with six significant digits."""
    parts = [f"step:{step}"]
    for name, value in metrics.items():
        parts.append(f"{name}:{value:.6g}" if isinstance(value, float) else f"{name}:{value}")
    return " - ".join(parts)


@contextmanager
def showing_stage(name: str) -> Iterator[None]:
    """Name a stage of the step beside the bar, if there is one, while the block runs; the outer one comes back."""
    progress, before = _live, _live.stage if _live else ""
    if progress:
        progress.stage = name
    try:
        yield
    finally:
        if progress:
            progress.stage = before


class Progress:
    """Live progress of a run on a terminal: steps, remaining time, and the metrics in ``SHOWN``.

    ::

        step 12  reward 0.431  length 118.2  entropy 0.512  grad 0.31  tokens/s 4,210  9.8 s
        ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  12/100 steps  2:10 elapsed  14:23 left  val 0.480  gen

    Each step adds a line above the bar. A notebook shows the last steps as a table that changes in place. Without
    either, the ``console`` tracker writes that line with the remaining time.

    Args:
        total_steps: number of the last step.
        first_step: number of the step that the run starts or resumes after.
        enabled: ``auto`` shows it on a terminal only, ``on`` always, ``off`` never.
        console: standard output by default.
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
        mode = {True: "on", False: "off"}.get(enabled, enabled) if isinstance(enabled, bool) else enabled
        self.console = console or _Output(force_terminal=True if mode == "on" else None)
        self.is_shown = mode == "on" or (mode == "auto" and (self.console.is_terminal or self.console.is_jupyter))
        self.table = NotebookTable() if self.is_shown and self.console.is_jupyter else None
        self._started = time.monotonic()
        self._finished_at: deque[float] = deque([self._started], maxlen=RECENT_STEPS + 1)
        self.stage = ""
        """Current activity of the run, shown beside the bar."""
        self._validation = ""
        self._seconds = math.nan
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=2)

    def __enter__(self) -> Progress:
        global _live, _run
        self._started = time.monotonic()
        self._finished_at.clear()
        self._finished_at.append(self._started)
        _run = self
        if self.is_shown:
            if self.table is None:
                with _ignoring_write_errors():
                    self._live.start()
            _live = self
        return self

    def __exit__(self, *error: object) -> None:
        global _live, _run
        _run = None
        if self.is_shown:
            _live = None
            if self.table is None:
                with _ignoring_write_errors():
                    self._live.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record and show a finished step."""
        now = time.monotonic()
        self._seconds = now - self._finished_at[-1]
        self.step = step
        self._finished_at.append(now)
        self._validation = _validation_text(metrics) or self._validation
        if self.table is not None:
            times = f"{clock(now - self._started)} elapsed, {clock(self.seconds_left())} left"
            self.table.add(_step_values(step, metrics, self._seconds), step, self.total_steps, times)
        elif self.is_shown:
            with _ignoring_write_errors():
                self.console.print(_step_text(step, metrics, self._seconds), soft_wrap=True)

    def line(self, step: int, metrics: Mapping[str, float]) -> Text:
        """The line of a step in a log; a step before the first :meth:`update`, a validation, has no times."""
        text = _step_text(step, metrics, self._seconds, self.total_steps)
        return text if math.isnan(self._seconds) else text.append(f"  {clock(self.seconds_left())} left")

    def seconds_left(self) -> float:
        """Estimate the seconds to the end from the recent steps; NaN before the first step is done."""
        steps = len(self._finished_at) - 1
        if steps == 0:
            return math.nan
        pace = (self._finished_at[-1] - self._finished_at[0]) / steps
        since = time.monotonic() - self._finished_at[-1]
        return max(0.0, pace * (self.total_steps - self.step) - since)

    def _render(self) -> RenderableType:
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self.total_steps, 1), completed=self.step, width=36)
        elapsed, left = clock(time.monotonic() - self._started), clock(self.seconds_left())
        steps = Text(f"{self.step}/{self.total_steps} steps", style="bold")
        times, stage = (Text(f"{elapsed} elapsed"), Text(f"{left} left")), Text(self.stage, style="dim")
        line.add_row(bar, steps, *times, Text(self._validation, style="green"), stage)
        return Group(line)


def clock(seconds: float) -> str:
    """Format seconds as ``1:02:03`` or ``2:03``; NaN as ``-:--``."""
    if math.isnan(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class NotebookTable:
    """The last steps of a run as a table in a notebook, replaced at each step."""

    def __init__(self) -> None:
        self.rows: deque[dict[str, str]] = deque(maxlen=RECENT_STEPS)
        self._done = ""
        self._bar = ""
        self._handle: Any = None

    def add(self, row: dict[str, str], step: int, total_steps: int, times: str) -> None:
        """Show a finished step in front of the earlier ones.

        Args:
            row: its values by label.
            step: its number.
            total_steps: number of the last step.
            times: words about the time that has elapsed and is left.
        """
        from IPython.display import display

        self.rows.appendleft(row)
        self._done = f"{step}/{total_steps} steps, {times}"
        self._bar = f'<progress value="{step}" max="{total_steps}" style="width: 20em"></progress>'
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        lines = ["  ".join(f"{label} {value}" for label, value in row.items()) for row in self.rows]
        return "\n".join([self._done, *lines])

    def _repr_html_(self) -> str:
        labels = list(dict.fromkeys(label for row in self.rows for label in row))
        head = "".join(f"<th>{html.escape(label)}</th>" for label in labels)
        cells = [[html.escape(row.get(label, "")) for label in labels] for row in self.rows]
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
        return f"{self._bar} {html.escape(self._done)}<table><tr>{head}</tr>{body}</table>"


def _step_values(step: int, metrics: Mapping[str, float], seconds: float) -> dict[str, str]:
    """Return the metrics in ``SHOWN`` that a step has, and those of its validation, formatted, by label."""
    values = {"step": str(step)}
    for label, names, form in SHOWN:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            values[label] = format(float(value), form)
    if validation := _validation_text(metrics):
        values["validation"] = validation.removeprefix("val ")
    return values if math.isnan(seconds) else values | {"seconds": f"{seconds:.1f}"}


def _step_text(step: int, metrics: Mapping[str, float], seconds: float, total: int | None = None) -> Text:
    text = Text(f"step {step}" if total is None else f"step {step}/{total}", style="bold")
    for label, names, form in SHOWN:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            text.append(f"  {label} ", style="dim").append(format(float(value), form), style="not bold")
    if validation := _validation_text(metrics):
        text.append(f"  {validation}", style="not bold green")
    return text if math.isnan(seconds) else text.append(f"  {seconds:.1f} s", style="dim")


def _validation_text(metrics: Mapping[str, float]) -> str:
    """Core validation metrics (mean@N of each data source), or the validation loss."""
    means = {name: value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name}
    if means:
        sources = {name: "/".join(name.split("/")[1:-2]) for name in means}  # data sources have slashes
        labels = {name: "" if source == "unknown" else f" {source}" for name, source in sources.items()}
        return "  ".join(f"val{labels[name]} {value:.3f}" for name, value in means.items())
    return f"val loss {metrics['val/loss']:.4f}" if "val/loss" in metrics else ""
