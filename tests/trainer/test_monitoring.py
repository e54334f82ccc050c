"""Metrics over HTTP: a run of ``main_ppo`` that is scraped while it trains."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.trainer.test_run import train  # noqa: F401
from verl.config import GenerationConfig, PrometheusConfig, RolloutConfig
from verl.errors import ConfigError
from verl.single_controller.base.worker import free_port
from verl.tracking import Tracking
from verl.tracking.prometheus import MetricsServer

PREFIX = "actor_rollout_ref.rollout.prometheus"
DASHBOARD = Path(__file__).parents[2] / "examples" / "monitoring" / "grafana_dashboard.json"
Scrape = dict[tuple[str, tuple[str, ...]], float]


def scrape(port: int) -> Scrape:
    """Samples of a scrape by name and values of labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(one.name, tuple(one.labels.values())): one.value for family in families for one in family.samples}


class Scraper(threading.Thread):
    """Scrapes again and again, from before the server is there until after it has gone."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.seen, self.over = port, [], threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.01):
            try:
                self.seen.append(scrape(self.port))
            except OSError:
                continue


def test_a_run_is_scraped_while_it_trains(train, tmp_path):  # noqa: F811
    port = free_port()
    scraper = Scraper(port)
    scraper.start()
    file = tmp_path / "of" / "prometheus.yml"
    settings = {"enable": "true", "port": port, "file": file, "served_model_name": "tiny"}
    steps = train(
        **{f"actor_rollout_ref__rollout__prometheus__{key}": value for key, value in settings.items()},
        actor_rollout_ref__rollout__name="native",
        trainer__val_before_train="true",
        trainer__project_name="pro",
        trainer__experiment_name="ex",
    )
    scraper.over.set()
    scraper.join()
    with pytest.raises(OSError, match="refused"):
        scrape(port)

    numbers = [{name: value for (name, labels), value in one.items() if not labels} for one in scraper.seen]
    assert numbers[0]["verl_step"] == 0
    assert "verl_step_timestamp_seconds" not in numbers[0]
    assert numbers[-1]["verl_steps"] == 2
    steps_seen = [one["verl_step"] for one in numbers]
    assert steps_seen == sorted(steps_seen)
    assert 1 in steps_seen

    during = next(one for one in reversed(numbers) if one["verl_step"] == 1)
    for name, value in steps[1].items():
        gauge = "verl_" + re.sub(r"[^a-z0-9]+", "_", name.lower().replace("@", "_at_"))
        assert {key.lower(): value for key, value in during.items()}[gauge] == value, name
    assert any(name.startswith("verl_val_core_countdown") for name in during)  # of the validation before step 1
    stages = {labels[0] for one in scraper.seen for name, labels in one if name == "verl_stage"}
    assert "step" in stages
    assert stages & {"gen", "update_actor"}  # on a busy machine one may be over between two scrapes
    inner = [{labels[0] for name, labels in one if name == "verl_stage"} for one in scraper.seen]
    assert all("step" in one for one in inner if "gen" in one)
    assert scraper.seen[0]["verl_run_info", ("ex", "tiny", "pro")] == 1
    assert during["process_resident_memory_bytes"] > 2**20
    assert f'targets: ["127.0.0.1:{port}"]' in file.read_text()

    # Every panel of the dashboard has numbers in this run.
    served = {name for one in scraper.seen for name, _ in one}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace('__name__=~"verl_timing_s_.*"', "verl_timing_s_gen")
            names = set(re.findall(r"\b(?:verl|process)_\w+", expression))
            assert names, target
            assert names <= served, target


def of_ranks(scrapes: list[Scrape], name: str) -> dict[str, list[float]]:
    """Values of a gauge of engines by rank, scrape by scrape."""
    found: dict[str, list[float]] = {}
    for one in scrapes:
        for (key, labels), value in one.items():
            if key == f"verl_engine_{name}":
                found.setdefault(labels[0], []).append(value)
    return found


@pytest.mark.slow
def test_the_engines_of_two_ranks_are_scraped_while_they_draw(train, ray_cluster):  # noqa: F811
    port = free_port()
    scraper = Scraper(port)
    scraper.start()
    key = "actor_rollout_ref__rollout__prometheus__"
    train(
        trainer__controller="ray",
        trainer__n_gpus_per_node=2,
        actor_rollout_ref__rollout__name="native",
        actor_rollout_ref__rollout__multi_turn__enable="true",
        data__max_response_length=96,
        **{f"{key}enable": "true", f"{key}port": port},
    )
    scraper.over.set()
    scraper.join()
    for name in ("requests_running", "memory_tokens", "prefix_cache_tokens", "prompt_tokens_total"):
        by_rank = of_ranks(scraper.seen, name)
        assert set(by_rank) == {"0", "1"}, name
        assert all(max(values) > 0 for values in by_rank.values()), name
    for values in of_ranks(scraper.seen, "prompt_tokens_total").values():
        assert values == sorted(values)
    for values in of_ranks(scraper.seen, "weight_version").values():
        assert set(values) <= {-1, 0, 2}  # none, and those of the two steps
        assert 0 in values
        assert values[-1] == -1


def test_a_taken_port_is_an_error_before_models_load(train):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        key = "actor_rollout_ref__rollout__prometheus"
        wanted = rf"port={port}.*in use.*choose another {re.escape(PREFIX)}\.port"
        with pytest.raises(ConfigError, match=wanted) as caught:
            train(**{f"{key}__enable": "true", f"{key}__port": port})
    assert "init_workers" not in [entry.name for entry in caught.traceback]
    assert not Tracking.listeners


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(PrometheusConfig(enable=True, port=free_port()), 'p"\n', "é")
    yield made
    made.close()


def test_names_that_become_the_same_and_values_that_are_no_numbers(server: MetricsServer):
    server.log({"a/b": 1.0, "a_b": 2.0, "step": 3.0, "val-core/x/acc/mean@1": float("nan"), "ü": float("inf")}, 7)
    found = scrape(server._server.server_port)
    assert found["verl_a_b", ()] == 1
    assert found["verl_a_b_2", ()] == 2
    assert found["verl_step", ()] == 7
    assert found["verl_step_2", ()] == 3
    assert found["verl_val_core_x_acc_mean_at_1", ()] != found["verl_val_core_x_acc_mean_at_1", ()]
    assert found["verl_", ()] == float("inf")
    assert found["verl_run_info", ("é", "", 'p"\n')] == 1


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    port = free_port()
    with pytest.raises(ConfigError, match=rf"{re.escape(PREFIX)}\.file=.*cannot be written: File exists"):
        MetricsServer(PrometheusConfig(enable=True, port=port, file=str(tmp_path / "file" / "p.yml")), "p", "e")
    socket.create_server(("127.0.0.1", port)).close()  # the port was given back


def test_generation_serves_none():
    asked = GenerationConfig(rollout=RolloutConfig(name="hf", prometheus=PrometheusConfig(enable=True)))
    (problem,) = [one for one in asked.problems("") if "prometheus" in one.key]
    assert (problem.key, problem.allowed) == ("rollout.prometheus.enable", "false")
