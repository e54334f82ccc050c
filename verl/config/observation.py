"""Configuration of what a run exposes to monitoring during training."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from verl.base.requirements import install_command
from verl.config.base import BaseConfig, section, setting
from verl.config.problems import Problem


@section
class PrometheusConfig(BaseConfig):
    """Metrics of the run over HTTP, in the format of Prometheus (docs/monitoring.md)."""

    hydra_target: ClassVar[str] = "verl.workers.config.PrometheusConfig"

    enable: bool = setting(False)
    """Serve the metrics from the driver's process; needs the extra `prometheus`."""
    host: str = setting("127.0.0.1")
    """Address to listen on. Everybody who can reach it can read the metrics; the default is this machine only."""
    port: int = setting(9090, ge=1, le=65535)
    """Port to listen on; note that 9090 is also the default port of a Prometheus server."""
    file: str | None = setting(None, path=True)
    """Path of a Prometheus configuration that is written for this run; null writes none."""
    served_model_name: str | None = setting(None, interpolation="${oc.select:actor_rollout_ref.model.path,null}")
    """Name of the model in `verl_run_info`."""

    def problems(self, path: str) -> Iterator[Problem]:
        """The client library is installed."""
        if self.enable and importlib.util.find_spec("prometheus_client") is None:
            remedy = f"{install_command('prometheus')}, or set {path}.enable=false"
            yield Problem(f"{path}.enable", True, "the package prometheus_client is not installed", remedy=remedy)


@section
class TraceConfig(BaseConfig):
    """Spans of each training trajectory, its turns and tool calls (docs/monitoring.md)."""

    hydra_target: ClassVar[str] = "verl.workers.config.TraceConfig"

    backend: Literal["otel", "mlflow"] | None = setting(
        None,
        refuse_values={
            "weave": "Weave accepts OpenTelemetry spans; use otel with OTEL_EXPORTER_OTLP_TRACES_ENDPOINT at its "
            "address",
            "trackio": "Trackio does not accept spans; use otel",
        },
    )
    """`otel` sends spans by OpenTelemetry's SDK to the collector that `OTEL_EXPORTER_OTLP_ENDPOINT` names, `mlflow` by
    MLflow's client to `MLFLOW_TRACKING_URI`; they need the extra of that name."""
    token2text: bool = setting(False)
    """Add the texts of prompts, responses, tool calls and results to the spans."""
    max_samples_per_step_per_worker: int | None = setting(None, ge=1)
    """Number of trajectories traced per step for each of `rollout.agent.num_workers`; null traces all."""

    def problems(self, path: str) -> Iterator[Problem]:
        """The client is installed, and the other settings have a backend."""
        modules, cause = _CLIENTS.get(self.backend or "", ((), ""))
        if not all(map(_is_installed, modules)):
            remedy = f"{install_command(str(self.backend))}, or set {path}.backend=null"
            yield Problem(f"{path}.backend", self.backend, cause, remedy=remedy)
        for name in ("token2text", "max_samples_per_step_per_worker"):
            if self.backend is None and self[name]:
                remedy = f"set {path}.backend=otel or mlflow, or leave {name} out"
                yield Problem(f"{path}.{name}", self[name], "nothing is traced", remedy=remedy, advice=True)


_CLIENTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "otel": (
        ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
        "OpenTelemetry's SDK and its exporter over HTTP are not installed",
    ),
    "mlflow": (("mlflow.tracing",), "MLflow's client is not installed"),
}
"""Backend → the modules that it needs, and what is wrong without them."""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
