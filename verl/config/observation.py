"""Configuration of what a run shows to monitoring while it trains."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import ClassVar

from verl.config.base import BaseConfig, section, setting
from verl.config.problems import Problem


@section
class PrometheusConfig(BaseConfig):
    """Metrics of the run over HTTP, in the format of Prometheus (docs/monitoring.md)."""

    hydra_target: ClassVar[str] = "verl.workers.config.PrometheusConfig"

    enable: bool = setting(False)
    """Serve the metrics from the driver's process; needs the extra `prometheus`."""
    host: str = setting("127.0.0.1")
    """Address to listen on. Whoever reaches it reads the metrics, so others than those of this machine are a choice."""
    port: int = setting(9090, ge=1, le=65535)
    """Port to listen on; a Prometheus server on this machine has 9090 itself, unless it is told otherwise."""
    file: str | None = setting(None, path=True)
    """File to write a Prometheus configuration to that scrapes this run; null writes none."""
    served_model_name: str | None = setting(None, interpolation="${oc.select:actor_rollout_ref.model.path,null}")
    """Name of the model in `verl_run_info`."""

    def problems(self, path: str) -> Iterator[Problem]:
        """The client library is installed."""
        if self.enable and importlib.util.find_spec("prometheus_client") is None:
            remedy = f"pip install 'verl[prometheus]', or set {path}.enable=false"
            yield Problem(f"{path}.enable", True, "the package prometheus_client is not installed", remedy=remedy)
