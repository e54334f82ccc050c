"""Serve the metrics of a run over HTTP in the format of Prometheus, with the library ``prometheus_client``."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from verl.config.observation import PrometheusConfig
from verl.errors import ConfigError
from verl.tracking import Tracking

_SCRAPE_CONFIG = """\
# Written by a run of verl that serves its metrics.
global:
  scrape_interval: 5s
scrape_configs:
  - job_name: verl
    static_configs:
      - targets: ["{target}"]
"""


class MetricsServer(Collector):
    """Serves the newest value of each metric that the trackers of this process get, until :meth:`close`.

    A metric ``critic/score/mean`` becomes the gauge ``verl_critic_score_mean``. Beside the metrics there are
    ``verl_step``, ``verl_steps`` (of the whole run), ``verl_step_timestamp_seconds`` (when the newest step ended),
    ``verl_stage{stage="gen"}`` (1 for the stages that are entered, outer ones included), ``verl_run_info`` and the
    process's own memory and time (``process_*``). With :attr:`engine_states` there are ``verl_engine_*{rank="0"}``.

    Args:
        config: address, port and file.
        project: value of the label ``project`` of ``verl_run_info``.
        experiment: value of its label ``experiment``.

    Raises:
        ConfigError: the address cannot be listened on, such as a port that is taken, or the file cannot be written.
    """

    def __init__(self, config: PrometheusConfig, project: str, experiment: str) -> None:
        self.total_steps = 0
        self.engine_states: Callable[[], Mapping[int, object]] = dict
        """Returns what the rollout engine of each rank does, at each scrape."""
        self._info = {"project": project, "experiment": experiment, "model": config.served_model_name or ""}
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._names: dict[str, str] = {}
        self._entered: list[str] = []
        self._step = 0
        self._logged_at: float | None = None
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        key = "actor_rollout_ref.rollout.prometheus"
        try:
            self._server, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as error:
            raise ConfigError(
                f"{key}.host={config.host}, port={config.port}: the metrics cannot be served there: {error.strerror}. "
                "The host is one of this machine. Another run, or a Prometheus server, may have the port: choose "
                f"another {key}.port."
            ) from error
        if config.file is not None:
            try:
                self._write_scrape_config(Path(config.file).expanduser(), config)
            except OSError as error:
                self.close()
                raise ConfigError(f"{key}.file={config.file} cannot be written: {error.strerror}.") from error
        Tracking.listeners.append(self.log)

    @staticmethod
    def _write_scrape_config(file: Path, config: PrometheusConfig) -> None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_SCRAPE_CONFIG.format(target=f"{host}:{config.port}"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take metrics of a step; those that are not among them keep their value."""
        with self._lock:
            self._values |= metrics
            self._step, self._logged_at = step, time.time()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show that the run is in a stage while the block runs."""
        with self._lock:
            self._entered.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._entered.remove(name)

    def collect(self) -> Iterable[Metric]:
        """Answer a scrape."""
        with self._lock:
            values, entered = dict(self._values), dict.fromkeys(self._entered)
            step, logged_at = self._step, self._logged_at
            names = {name: self._gauge_name(name) for name in values}
        yield InfoMetricFamily("verl_run", "What runs.", self._info)
        yield GaugeMetricFamily("verl_step", "Newest finished step.", step)
        yield GaugeMetricFamily("verl_steps", "Steps of the whole run.", self.total_steps)
        if logged_at is not None:
            yield GaugeMetricFamily("verl_step_timestamp_seconds", "When the newest step ended.", logged_at)
        stages = GaugeMetricFamily("verl_stage", "Stages that the run is in.", labels=["stage"])
        for stage in entered:
            stages.add_metric([stage], 1)
        yield stages
        yield from self._of_engines()
        for name, value in values.items():
            yield GaugeMetricFamily(names[name], f"Metric {name}, of the newest step that has it.", value)

    def _of_engines(self) -> Iterator[Metric]:
        states = self.engine_states()
        families: list[tuple[str, GaugeMetricFamily | CounterMetricFamily]] = [
            *(
                (name, GaugeMetricFamily(f"verl_engine_{name}", what, labels=["rank"]))
                for name, what in _ENGINE_GAUGES.items()
            ),
            *(
                (name, CounterMetricFamily(f"verl_engine_{name}", what, labels=["rank"]))
                for name, what in _ENGINE_COUNTERS.items()
            ),
        ]
        for name, family in families:
            for rank, state in sorted(states.items()):
                value = getattr(state, name)
                if value is not None:
                    family.add_metric([str(rank)], value)
            yield family

    def _gauge_name(self, name: str) -> str:
        """``critic/score/mean`` → ``verl_critic_score_mean``; of two that would be the same the later gets ``_2``."""
        if name not in self._names:
            plain = re.sub(r"[^a-zA-Z0-9]+", "_", name.replace("@", "_at_")).strip("_")
            base_name = gauge = f"verl_{plain}"
            used_names, count = {*self._names.values(), *_RESERVED_NAMES}, 1
            while gauge in used_names:
                count += 1
                gauge = f"{base_name}_{count}"
            self._names[name] = gauge
        return self._names[name]

    def close(self) -> None:
        """Stop listening."""
        if self.log in Tracking.listeners:
            Tracking.listeners.remove(self.log)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_ENGINE_GAUGES = {
    "weight_version": "Version of the weights that the engine holds, -1 for none.",
    "requests_running": "Responses that are being drawn.",
    "requests_waiting": "Requests that wait for room.",
    "memory_use": "Share of the memory for keys and values that running requests take, 0 to 1.",
    "memory_tokens": "Tokens of running requests whose keys and values are in memory.",
    "prefix_cache_tokens": "Tokens of earlier texts whose keys and values are kept.",
}
_ENGINE_COUNTERS = {
    "prompt_tokens": "Prompt tokens of all requests.",
    "prefix_hit_tokens": "Prompt tokens whose keys and values were kept from earlier texts.",
    "response_tokens": "Response tokens that were drawn.",
    "proposed_tokens": "Tokens that heads of multi-token prediction proposed.",
    "accepted_tokens": "Proposed tokens that became part of responses.",
    "preemptions": "Interruptions of requests for want of memory.",
}
"""Fields of an engine's state, and what they are."""
_RESERVED_NAMES = (
    *("verl_run_info", "verl_step", "verl_steps", "verl_step_timestamp_seconds", "verl_stage"),
    *(f"verl_engine_{name}" for name in _ENGINE_GAUGES),
    *(f"verl_engine_{name}_total" for name in _ENGINE_COUNTERS),
)
