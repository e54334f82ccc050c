"""Traces of a run of ``main_ppo`` with tools, as a collector receives them over HTTP."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.agents.test_agent_loops import PARSER, TOOL
from tests.trainer.config.conftest import run  # noqa: F401
from tests.trainer.config.support import only
from tests.trainer.test_run import train  # noqa: F401
from verl.config import GenerationConfig, RolloutConfig, TraceConfig

TRACE = "actor_rollout_ref__rollout__trace__"

# Ray's processes have the environment that Ray was started in: what a run sets later does not reach them.
LOOP = """
import my_parser
from verl.agents.tool_agent import ToolAgentLoop

class WithParser(ToolAgentLoop):
    pass
"""


class Collector:
    """A server of OTLP over HTTP that keeps all spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: Span) -> list[Span]:
        found = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


def values(span: Span) -> dict[str, Any]:
    """Attributes of a span."""
    return {one.key.removeprefix("verl."): getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.server.server_port}")
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.thread.join()


def train_with_tools(train, tmp_path, monkeypatch, tool=TOOL, **more):  # noqa: F811
    (tmp_path / "my_parser.py").write_text(PARSER)
    (tmp_path / "my_tools.py").write_text(tool)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_parser")
    turns = "actor_rollout_ref__rollout__multi_turn__"
    return train(
        data__max_response_length=96,
        data__max_prompt_length=400,
        actor_rollout_ref__rollout__ignore_eos="false",
        **{
            f"{turns}enable": "true",
            f"{turns}function_tool_path": tmp_path / "my_tools.py",
            f"{turns}format": "every_turn_calls",
            f"{turns}max_assistant_turns": 2,
            f"{TRACE}backend": "otel",
        }
        | more,
    )


def check_scores(collector: Collector, steps: dict[int, dict[str, float]]) -> None:
    """The spans of each step have the scores that its metrics are of."""
    for number, metrics in steps.items():
        roots = [values(root) for root in collector.named("trajectory")]
        scores = [root["score"] for root in roots if root["step"] == number]
        assert sum(scores) / len(scores) == pytest.approx(metrics["critic/score/mean"])


def check_trees(collector: Collector) -> None:
    """Two steps of 4 prompts × 4 samples; each inner span lies inside the one above it."""
    roots = collector.named("trajectory")
    assert len(roots) == 2 * 4 * 4
    assert len({root.trace_id for root in roots}) == len(roots)
    assert {values(root)["step"] for root in roots} == {1, 2}
    by_id = {span.span_id: span for span in collector.spans}
    for span in collector.spans:
        if span.parent_span_id:
            above = by_id[span.parent_span_id]
            assert above.trace_id == span.trace_id
            assert above.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= above.end_time_unix_nano
    used_up = [root for root in roots if values(root)["status"] == "turns_used_up"]
    assert used_up
    for root in used_up:
        first, second, reward = collector.below(root)
        assert [first.name, second.name, reward.name] == ["turn", "turn", "reward"]
        generation, call = collector.below(first)
        assert (generation.name, call.name, values(call)["tool"]) == ("generation", "tool_call", "double")
        assert generation.end_time_unix_nano <= call.start_time_unix_nano
        assert [span.name for span in collector.below(second)] == ["generation"]
        assert values(reward)["score"] == values(root)["score"]


def test_each_trajectory_is_a_trace_of_turns_calls_and_reward(train, tmp_path, monkeypatch, collector):  # noqa: F811
    steps = train_with_tools(train, tmp_path, monkeypatch, **{f"{TRACE}token2text": "true"})
    check_trees(collector)
    check_scores(collector, steps)
    roots = collector.named("trajectory")
    assert {values(root)["weight_version"] for root in roots} == {0, 2}  # optimizer steps
    assert all("make" in values(root)["prompt"] for root in roots)
    assert {values(call)["content"] for call in collector.named("tool_call")} == {"42"}
    assert '"number": 21' in values(collector.named("generation")[0])["tool_calls"].replace("\\", "")
    assert collector.resources[0]["service.name"] == "verl"


@pytest.mark.slow
def test_trajectories_of_two_processes_and_two_ranks_reach_one_collector(
    train,  # noqa: F811
    tmp_path,
    monkeypatch,
    collector,
    ray_cluster,
):
    (calls := tmp_path / "calls").mkdir()
    note = f"open(f'{calls}/{{os.getpid()}}', 'a').write('x')"
    tool = "import os\n" + TOOL.replace("    return", f"    {note}\n    return")
    (tmp_path / "my_loops.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: with_parser, _target_: WithParser, path: {tmp_path}/my_loops.py}}")
    settings = {
        "actor_rollout_ref__rollout__agent__agent_loop_config_path": tmp_path / "loops.yaml",
        "actor_rollout_ref__rollout__agent__default_agent_loop": "with_parser",
        "trainer__controller": "ray",
        "trainer__n_gpus_per_node": 2,
        "actor_rollout_ref__rollout__agent__num_workers": 2,
        f"{TRACE}token2text": "true",
    }
    steps = train_with_tools(train, tmp_path, monkeypatch, tool, **settings)
    check_trees(collector)
    check_scores(collector, steps)
    called = {int(file.name): len(file.read_text()) for file in calls.iterdir()}
    assert len(called) == 2
    assert os.getpid() not in called
    assert sum(called.values()) == len(collector.named("tool_call"))


def test_without_agent_loops_and_with_few_samples(train, collector):  # noqa: F811
    few = {f"{TRACE}max_samples_per_step_per_worker": 3, "actor_rollout_ref__rollout__agent__num_workers": 1}
    train(**{f"{TRACE}backend": "otel", **few})
    roots = collector.named("trajectory")
    assert [values(root)["step"] for root in roots] == [1] * 3 + [2] * 3
    assert not any({"prompt", "response"} & values(root).keys() for root in roots)
    for root in roots:
        turn, reward = collector.below(root)
        (generation,) = collector.below(turn)
        assert generation.end_time_unix_nano <= reward.start_time_unix_nano
        assert 0 < values(root)["response_tokens"] <= 8


def test_a_collector_that_is_not_there_stops_no_run(train, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    assert max(train(**{f"{TRACE}backend": "otel"})) == 2
    assert "Failed to export spans batch" in caplog.text


@pytest.mark.slow
def test_mlflow_holds_each_trajectory_with_its_turns_calls_and_reward(train, tmp_path, monkeypatch):  # noqa: F811
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    steps = train_with_tools(
        train, tmp_path, monkeypatch, trainer__project_name="proj", trainer__experiment_name="exp",
        **{f"{TRACE}backend": "mlflow", f"{TRACE}token2text": "true"},
    )  # fmt: skip
    experiment = mlflow.get_experiment_by_name("proj").experiment_id
    traces = mlflow.search_traces(locations=[experiment], max_results=100, return_type="list")
    assert len(traces) == 2 * 4 * 4
    scores: dict[int, list[float]] = {}
    called = 0
    for trace in traces:
        (root,) = (span for span in trace.data.spans if span.parent_id is None)
        below = {
            span.span_id: [one for one in trace.data.spans if one.parent_id == span.span_id]
            for span in trace.data.spans
        }
        assert (root.name, root.span_type, trace.info.tags["verl.experiment"]) == ("trajectory", "AGENT", "exp")
        assert "make" in root.inputs["prompt"]
        assert isinstance(root.outputs, str)
        assert root.attributes["verl.response_tokens"] >= root.attributes["verl.trained_tokens"] > 0
        scores.setdefault(root.attributes["verl.step"], []).append(root.attributes["verl.score"])
        *turns, reward = sorted(below[root.span_id], key=lambda span: span.start_time_ns)
        assert (reward.name, reward.span_type) == ("reward", "EVALUATOR")
        for turn in turns:
            generation, *calls = sorted(below[turn.span_id], key=lambda span: span.start_time_ns)
            assert (turn.name, generation.name, generation.span_type) == ("turn", "generation", "LLM")
            assert (
                root.start_time_ns
                <= turn.start_time_ns
                <= generation.end_time_ns
                <= turn.end_time_ns
                <= root.end_time_ns
            )
            assert all((call.name, call.span_type, call.outputs) == ("tool_call", "TOOL", "42") for call in calls)
            called += len(calls)
    assert called > 0
    for number, metrics in steps.items():
        assert sum(scores[number]) / len(scores[number]) == pytest.approx(metrics["critic/score/mean"])


def test_weave_names_the_way_by_otel(run):  # noqa: F811
    message = only(run.refusal({"actor_rollout_ref.rollout.trace.backend": "weave"}))
    assert "Weave accepts OpenTelemetry spans" in message
    assert "use otel with OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in message


def test_settings_without_a_backend(run, caplog):  # noqa: F811
    run.load({"actor_rollout_ref.rollout.trace.token2text": True})
    assert "token2text=true: nothing is traced" in caplog.text


def test_generation_is_not_traced():
    asked = GenerationConfig(rollout=RolloutConfig(name="hf", trace=TraceConfig(backend="otel")))
    assert [one.key for one in asked.problems("") if "trace" in one.key] == ["rollout.trace.backend"]
