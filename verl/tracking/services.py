"""Trackers of experiment services, which read address and login from their own environment variables.

============ ========================================= ==================================================
tracker      without a server                          with one
============ ========================================= ==================================================
wandb        WANDB_MODE=offline                        WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL
mlflow       MLFLOW_TRACKING_URI=file:mlruns,          MLFLOW_TRACKING_URI; MLFLOW_RUN_ID continues a run
             MLFLOW_ALLOW_FILE_STORE=true
swanlab      SWANLAB_MODE=offline                      SWANLAB_API_KEY
clearml      CLEARML_OFFLINE_MODE=1                    clearml.conf, or CLEARML_API_ACCESS_KEY and the like
trackio      always; files under TRACKIO_DIR           TRACKIO_SPACE_ID
============ ========================================= ==================================================
"""

from __future__ import annotations

import io
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import ConfigError
from verl.tracking.base import TRACKERS, Tracker, flatten, import_package, markdown_table

if TYPE_CHECKING:
    from verl.utils.token_page import TokenPage

Rows = Sequence[Sequence[object]]


@TRACKERS.register("wandb")
class WandbTracker(Tracker):
    """Weights & Biases."""

    package = "wandb"

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None:
        self.require()
        self._wandb = import_package("wandb", "wandb")
        self._run = self._wandb.init(project=project_name, name=experiment_name, config=dict(config))
        self.run_id = self._run.id

    @classmethod
    def variables_of_run(cls, run_id: str) -> Mapping[str, str]:
        """Continue the run; wandb ignores steps that it already has."""
        return {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send all metrics of the step in one call."""
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        """Log a ``wandb.Table``; cells other than numbers become text."""
        data = [[cell if isinstance(cell, int | float) else str(cell) for cell in row] for row in rows]
        table = self._wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
        self._run.log({name: table}, step=step)

    def log_page(self, name: str, page: TokenPage, step: int) -> None:
        """Log a ``wandb.Html``."""
        self._run.log({name: self._wandb.Html(page.html, inject=False)}, step=step)

    def log_checkpoint(self, step: int, folder: Path) -> None:
        """Log an artifact of type ``model``, whose files wandb copies now and uploads beside the run."""
        artifact = self._wandb.Artifact(f"{self._run.id}-checkpoint", type="model", metadata={"step": step})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=[f"step_{step}"])

    def log_alert(self, step: int, rule: str, reason: str) -> None:
        """Send an alert, which the service passes on to people as their settings say."""
        self._run.alert(title=rule, text=f"step {step}: {reason}", level=self._wandb.AlertLevel.WARN)

    def finish(self) -> None:
        """Upload buffered records and end the run."""
        self._run.finish()


@TRACKERS.register("mlflow")
class MlflowTracker(Tracker):
    """MLflow; in names ``@`` is replaced by ``_at_`` and other characters that MLflow does not allow by ``_``."""

    package = "mlflow"
    params_per_call = 100
    param_length = 500

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None:
        self.require()
        self._mlflow = import_package("mlflow", "mlflow")
        self._mlflow.set_experiment(project_name)
        self._run = self._mlflow.start_run(run_name=experiment_name)
        self.run_id = self._run.info.run_id
        logged_params = self._run.data.params  # a continued run has parameters already, which cannot be changed
        named = {self._name(key): str(value)[: self.param_length] for key, value in flatten(config).items()}
        params = [(name, value) for name, value in named.items() if name not in logged_params]
        for start in range(0, len(params), self.params_per_call):
            self._mlflow.log_params(dict(params[start : start + self.params_per_call]))

    @classmethod
    def variables_of_run(cls, run_id: str) -> Mapping[str, str]:
        """Continue the run; a repeated step has two points."""
        return {"MLFLOW_RUN_ID": run_id}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send all metrics of the step in one call."""
        self._mlflow.log_metrics({self._name(name): value for name, value in metrics.items()}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        """Log an artifact with one JSON file per step."""
        data = {column: [str(row[column_index]) for row in rows] for column_index, column in enumerate(columns)}
        self._mlflow.log_table(data, artifact_file=f"{name}/step_{step}.json")

    def log_page(self, name: str, page: TokenPage, step: int) -> None:
        """Log an artifact with one HTML file per step, which MLflow's page shows."""
        self._mlflow.log_text(page.html, artifact_file=f"{name}/step_{step}.html")

    def log_checkpoint(self, step: int, folder: Path) -> None:
        """Upload the folder as ``checkpoints/global_step_N`` among the artifacts of the run."""
        self._mlflow.log_artifacts(str(folder), artifact_path=f"checkpoints/{folder.name}")

    def log_alert(self, step: int, rule: str, reason: str) -> None:
        """Set a tag of the run, ``alert.{rule}``, to the newest alert of the rule."""
        self._mlflow.set_tag(self._name(f"alert.{rule}"), f"step {step}: {reason}")

    def finish(self) -> None:
        """Mark the run as finished."""
        self._mlflow.end_run()

    @staticmethod
    def _name(name: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


@TRACKERS.register("swanlab")
class SwanlabTracker(Tracker):
    """SwanLab."""

    package = "swanlab"

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None:
        self.require()
        self._swanlab = import_package("swanlab", "swanlab")
        self._swanlab.init(
            project=project_name, experiment_name=experiment_name, config={"FRAMEWORK": "verl", **config}
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send all metrics of the step in one call."""
        self._swanlab.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        """Log a text per row."""
        texts = ["\n".join(f"{column}: {cell}" for column, cell in zip(columns, row, strict=True)) for row in rows]
        self._swanlab.log({name: [self._swanlab.Text(text) for text in texts]}, step=step)

    def log_page(self, name: str, page: TokenPage, step: int) -> None:
        """Log a ``swanlab.Html``."""
        self._swanlab.log({name: self._swanlab.Html(page.html)}, step=step)

    def log_alert(self, step: int, rule: str, reason: str) -> None:
        """Log a text."""
        self._swanlab.log({f"alerts/{rule}": self._swanlab.Text(reason)}, step=step)

    def finish(self) -> None:
        """Upload buffered records and end the run."""
        self._swanlab.finish()


@TRACKERS.register("clearml")
class ClearmlTracker(Tracker):
    """ClearML; NaN and infinities are written to its text log, because plots would show NaN as 0."""

    package = "clearml"

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None:
        self.require()
        task = import_package("clearml", "clearml").Task
        self._task = task.init(project_name=project_name, task_name=experiment_name, output_uri=False)
        self._task.connect_configuration(dict(config), name="Hyperparameters")
        self._logger = self._task.get_logger()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report ``critic/score/mean`` as the series ``score/mean`` of the plot ``critic``, and so on."""
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):
                self._logger.report_scalar(title, series or title, value, iteration=step)
            else:
                self._logger.report_text(f"step {step}: {name} is {value}", print_console=False)

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        """Report a table plot."""
        title, _, series = name.partition("/")
        table = [list(columns), *([str(cell) for cell in row] for row in rows)]
        self._logger.report_table(title, series or title, iteration=step, table_plot=table)

    def log_page(self, name: str, page: TokenPage, step: int) -> None:
        """Report an HTML file among the debug samples."""
        title, _, series = name.partition("/")
        stream = io.StringIO(page.html)
        self._logger.report_media(title, series or title, iteration=step, stream=stream, file_extension=".html")

    def log_alert(self, step: int, rule: str, reason: str) -> None:
        """Write a line to the text log of the task."""
        self._logger.report_text(f"step {step}: {rule}: {reason}", print_console=False)

    def finish(self) -> None:
        """Close the task."""
        self._task.close()


@TRACKERS.register("trackio")
class TrackioTracker(Tracker):
    """Trackio: a local database with a dashboard (``trackio show``)."""

    package = "trackio"

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None:
        self.require()
        self._trackio = import_package("trackio", "trackio")
        self._trackio.init(project=project_name, name=experiment_name, config=dict(config), resume="allow")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send all metrics of the step in one call."""
        self._trackio.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        """Log the table as Markdown."""
        self._trackio.log({name: self._trackio.Markdown(markdown_table(columns, rows))}, step=step)

    def log_page(self, name: str, page: TokenPage, step: int) -> None:
        """Keep an HTML file as a version of an artifact: Trackio's dashboard shows no HTML, and hands the file out."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"step_{step}.html"
            file.write_text(page.html, encoding="utf-8")
            self._trackio.log_artifact(file, name=name.replace("/", "-"), type="page", aliases=[f"step_{step}"])

    def log_alert(self, step: int, rule: str, reason: str) -> None:
        """Send an alert, which the dashboard shows, and which ``TRACKIO_WEBHOOK_URL`` gets."""
        self._trackio.alert(title=rule, text=f"step {step}: {reason}")

    def finish(self) -> None:
        """Write buffered records and end the run."""
        self._trackio.finish()


@TRACKERS.register("vemlp_wandb")
class VemlpWandbTracker(Tracker):
    """Placeholder that raises a ConfigError: the client of Volcengine's ML platform is not public."""

    @classmethod
    def require(cls) -> None:
        """Raise a ConfigError."""
        raise ConfigError(
            "tracker 'vemlp_wandb' needs the client of Volcengine's ML platform, which no public package holds. "
            "Use 'wandb' with WANDB_BASE_URL and WANDB_API_KEY of that platform."
        )

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object]) -> None:
        self.require()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Raise a ConfigError; never called, as the constructor raises."""
        self.require()
