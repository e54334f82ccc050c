"""Trackers without a service: console, file, tensorboard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.base import env
from verl.base.fs import below
from verl.errors import ConfigError
from verl.tracking.base import TRACKERS, Tracker, import_package, markdown_table
from verl.utils.console import metrics_line, show, write_step
from verl.utils.file_log import THIS_RUN, cut_own_end
from verl.utils.run_log import RunLog, clock, json_text

if TYPE_CHECKING:
    from verl.utils.token_page import TokenPage


@TRACKERS.register("console")
class ConsoleTracker(Tracker):
    """Writes a line per step: in a run its main metrics, always the same ones, and the remaining time; else all."""

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None:
        pass

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the line of the step."""
        write_step(step, metrics)


@TRACKERS.register("console_full")
class FullConsoleTracker(ConsoleTracker):
    """Writes all metrics of a step on one line, by name: ``step:12 - actor/pg_loss:0.1 - critic/score/mean:0.5``."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the line of the step."""
        show(metrics_line(step, dict(sorted(metrics.items()))))


@TRACKERS.register("file")
class FileTracker(Tracker):
    """Writes a line of JSON per step, ``{"step": 12, "data": {...}, "time": seconds since 1970, "run": id}``.

    Tables have ``table`` and ``rows``. Settings, checkpoints and the end go to a file beside it, of
    :mod:`verl.utils.run_log`, unless the file is a device.

    The file is ``VERL_FILE_LOGGER_PATH``, or ``{VERL_FILE_LOGGER_ROOT}/{project}/{experiment}.jsonl``. A run appends
    to it; a resumed run first removes its own lines of repeated steps from the end. NaN and infinities are null.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None:
        path = env.file_logger_path(project_name, experiment_name)
        self._before = os.environ.get(env.FILE_LOGGER_RUN)
        self.run_id = self._before or THIS_RUN
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._log = RunLog(path, self.run_id) if path.is_file() else None
        except OSError as error:
            raise ConfigError(
                f"tracker 'file' cannot write {path}: {error}. Set VERL_FILE_LOGGER_PATH or VERL_FILE_LOGGER_ROOT."
            ) from error
        if self._log is not None:
            self._log.start(config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a line and flush it, so that it is kept if the process is killed."""
        self._write({"step": step, "data": dict(metrics), "time": round(clock(), 3)})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Write one line with all rows, each as an object."""
        objects = [dict(zip(columns, row, strict=True)) for row in rows]
        self._write({"step": step, "table": name, "rows": objects})

    def go_on_after(self, step: int) -> None:
        """Remove this run's lines of later steps, and a line that a crash left unfinished, from the end."""
        cut_own_end(Path(self._file.name), self._before, step)
        self.log_event("resume", {"step": step})

    def log_event(self, event: str, details: Mapping[str, object]) -> None:
        """Write a line to the file of events."""
        if self._log is not None:
            self._log.write(event, **details)

    @classmethod
    def variables_of_run(cls, run_id: str) -> Mapping[str, str]:
        """See :meth:`Tracker.variables_of_run`."""
        return {env.FILE_LOGGER_RUN: run_id}

    def finish(self) -> None:
        """Close the file."""
        self._file.close()
        if self._log is not None:
            self._log.close()

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(json_text(record | {"run": self.run_id}) + "\n")
        self._file.flush()


@TRACKERS.register("tensorboard")
class TensorboardTracker(Tracker):
    """Writes TensorBoard event files to ``{TENSORBOARD_DIR}/{project}/{experiment}``."""

    package = "tensorboard"

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None:
        self.require()
        self._folder = str(below(env.tensorboard_dir(), project_name, experiment_name))
        self._make_writer = import_package("torch.utils.tensorboard", "torch tensorboard").SummaryWriter
        self._writer = self._make_writer(log_dir=self._folder)
        self._writer.add_text("config", "```\n" + json.dumps(config, indent=2, default=str) + "\n```", 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def go_on_after(self, step: int) -> None:
        """Make TensorBoard hide later steps of earlier event files."""
        self._writer.close()
        self._writer = self._make_writer(log_dir=self._folder, purge_step=step + 1, filename_suffix=".resumed")

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Write the table as Markdown text."""
        self._writer.add_text(name, markdown_table(columns, rows), step)

    def log_page(self, name: str, page: TokenPage, step: int) -> None:
        """Write the page as Markdown text: TensorBoard shows no colours in texts."""
        self._writer.add_text(name, page.markdown, step)

    def log_alert(self, step: int, rule: str, reason: str) -> None:
        """Write a text."""
        self._writer.add_text(f"alerts/{rule}", reason, step)

    def finish(self) -> None:
        """Write buffered events and close the file."""
        self._writer.close()
