"""Tracking: destinations of metrics, failures that do not stop a run, and masked secrets.

A full disk under the file tracker, or a server that fails, leaves the other trackers working; a client that takes more
than 1 s to fail is skipped for 1, 3, 7, ... 63 calls. A server that is unreachable at the start is an error only if it
is the only tracker. A wrong name or a missing login is always an error.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import verl.tracking
from verl.base.redact import without_secrets
from verl.errors import ConfigError
from verl.tracking import TRACKERS, Tracker, Tracking, ValidationGenerationsLogger, require_trackers
from verl.tracking.base import flatten, markdown_table
from verl.utils.file_log import THIS_RUN
from verl.utils.step_context import StepContext


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorder(fail: tuple[int, ...] = ()) -> type[Tracker]:
    """A tracker that keeps what it gets, and fails on some of its calls."""

    @TRACKERS.register("recorder")
    class Recorder(Tracker):
        def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
            self.start = (project_name, experiment_name, config)
            self.calls: list = []
            self.finished = 0

        def log(self, metrics: Mapping[str, float], step: int) -> None:
            self.calls.append((step, dict(metrics)))
            if len(self.calls) in fail:
                raise RuntimeError(f"no connection at call {len(self.calls)}")

        def finish(self) -> None:
            self.finished += 1

    return Recorder


def test_numbers_of_every_kind_become_python_numbers(caplog: pytest.LogCaptureFixture):
    recorder()
    tracking = Tracking("p", "e", "recorder", {})
    numbers = {
        "a": 1, "b": 0.5, "c": True, "d": np.float32(0.25), "e": np.int64(3), "f": torch.tensor(2.5),
        "g": torch.tensor([7]), "h": np.array([1.5]), "i": float("nan"), "j": torch.tensor(math.inf),
    }  # fmt: skip
    tracking.log({**numbers, "text": "x", "list": [1, 2], "matrix": torch.ones(2)}, step=4)
    tracking.log({"text": "x"}, step=5)
    (step, found), _ = tracking.trackers["recorder"].calls
    assert step == 4
    assert math.isnan(found.pop("i"))
    assert found == {"a": 1, "b": 0.5, "c": 1, "d": 0.25, "e": 3, "f": 2.5, "g": 7, "h": 1.5, "j": math.inf}
    assert all(type(value) in (int, float) for value in found.values())
    assert caplog.text.count("metric 'text' is a str, not a number") == 1
    assert "metric 'list'" in caplog.text
    assert "metric 'matrix'" in caplog.text


def test_a_tracker_that_fails_later_does_not_stop_the_run(caplog: pytest.LogCaptureFixture):
    recorder(fail=(2, 3))
    tracking = Tracking("p", "e", ["recorder", "file"], {})
    for step in (1, 2, 3, 4):
        tracking.log({"x": step}, step=step)
    assert caplog.text.count("tracker 'recorder' failed; training goes on") == 1
    assert "no connection at call 2" in caplog.text
    tracking.finish()
    assert "tracker 'recorder' failed in 2 of 5 calls" in caplog.text
    assert [line["data"]["x"] for line in lines(Path("p/e.jsonl"))] == [1, 2, 3, 4]


def test_an_interrupt_is_not_a_failure_of_a_tracker():
    cls = recorder()

    def stop(self: Tracker, metrics: Mapping, step: int) -> None:
        raise KeyboardInterrupt

    cls.log = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        Tracking("p", "e", "recorder", {}).log({"x": 1}, step=1)


def test_a_tracker_that_cannot_start_stops_the_run():
    cls = recorder()

    def refuse(self: Tracker, *arguments: object) -> None:
        raise OSError("no login")

    cls.__init__ = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no login") as caught:
        Tracking("p", "e", "recorder", {})
    assert "tracker 'recorder' started" in "".join(caught.value.__notes__)


class Server:
    """An HTTP service on loopback, and a tracker that sends to it."""

    def __init__(self) -> None:
        self.got: list[dict] = []
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._handler, self.port = Handler, 0
        self.start()
        url = f"http://127.0.0.1:{self.port}"

        @TRACKERS.register("service")
        class Service(Tracker):
            def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
                self.log({"hello": 0}, step=0)

            def log(self, metrics: Mapping[str, float], step: int) -> None:
                body = json.dumps({"step": step, **metrics}).encode()
                try:
                    urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=30).close()
                except urllib.error.URLError as error:
                    raise RuntimeError("the service did not take it") from error  # as clients do

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_server_that_goes_and_comes_back(caplog: pytest.LogCaptureFixture):
    server = Server()
    with Tracking("p", "e", ["service", "file"], {}) as tracking:
        for step in (1, 2, 3, 4):
            if step == 2:
                server.stop()
            if step == 4:
                server.start()
            tracking.log({"x": step}, step=step)
        server.stop()
    assert server.got == [{"step": 0, "hello": 0}, {"step": 1, "x": 1}, {"step": 4, "x": 4}]
    assert [line["data"]["x"] for line in lines(Path("p/e.jsonl"))] == [1, 2, 3, 4]
    assert caplog.text.count("tracker 'service' failed; training goes on") == 1
    assert "tracker 'service' failed in 2 of 5 calls; its record has gaps" in caplog.text


def test_a_server_that_is_not_there_at_the_start_is_tried_again(caplog: pytest.LogCaptureFixture):
    server = Server()
    server.stop()
    with Tracking("p", "e", ["service", "file"], {}) as tracking:
        tracking.log({"x": 1}, step=1)
        server.start()
        tracking.log({"x": 2}, step=2)
        tracking.log_table("t", ["a"], [["b"]], step=2)
    server.stop()
    assert server.got == [{"step": 0, "hello": 0}, {"step": 2, "x": 2}]
    assert caplog.text.count("training goes on") == 1
    assert "Connection refused" in caplog.text
    with pytest.raises(RuntimeError, match="did not take it"):  # nothing would be left of the run's numbers
        Tracking("p", "e", "service", {})


def test_a_client_that_takes_long_to_fail_rests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verl.tracking, "SLOW_S", -1.0)  # whatever fails took longer than that
    cls = recorder(fail=(1, 2, 3, 5))
    tracking = Tracking("p", "e", "recorder", {})
    tracker = tracking.trackers["recorder"]
    assert isinstance(tracker, cls)
    for step in range(1, 20):
        tracking.log({"x": 1}, step=step)
    # Fails at 1, rests for 1; at 3, rests for 3; at 7, rests for 7; works at 15; fails at 16, rests for 1 again.
    assert [step for step, _ in tracker.calls] == [1, 3, 7, 15, 16, 18, 19]


def test_a_full_disk_costs_lines_and_no_run(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "/dev/full")
    cls = recorder()
    with Tracking("p", "e", ["file", "recorder"], {}) as tracking:
        kept = tracking.trackers["recorder"]
        for step in (1, 2):
            tracking.log({"x": step}, step=step)
    assert isinstance(kept, cls)
    assert [step for step, _ in kept.calls] == [1, 2]
    assert "No space left on device" in caplog.text
    assert "tracker 'file' failed in 3 of 4 calls" in caplog.text


def test_finish_is_called_once_and_at_the_end_of_a_with_block():
    recorder()
    with Tracking("p", "e", "recorder", {}) as tracking:
        tracker = tracking.trackers["recorder"]
    tracking.finish()
    tracking.log({"x": 1}, step=1)
    assert tracker.finished == 1
    assert tracker.calls == []


def test_a_resumed_run_drops_the_steps_that_it_does_again():
    with Tracking("p", "e", "file", {}) as tracking:  # an earlier run with more steps, in the same file
        for step in (1, 2, 3, 4):
            tracking.log({"x": 0}, step=step)
    with Tracking("p", "e", "file", {}) as tracking:
        for step in (1, 2, 3):
            tracking.log({"x": step}, step=step)
    with Path("p/e.jsonl").open("a") as file:
        file.write('{"step": 4, "da')  # killed while it wrote
    with Tracking("p", "e", "file", {}, resumed_after=2, run_ids={"file": THIS_RUN}) as tracking:
        tracking.log({"x": 30}, step=3)
    found = [(line["step"], line["data"]["x"]) for line in lines(Path("p/e.jsonl"))]
    assert found == [(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 2), (3, 30)]


def test_a_resumed_run_keeps_the_lines_of_others(caplog: pytest.LogCaptureFixture):
    def write(run: str, *steps: int, resumed_after: int = 0) -> None:
        with Tracking("p", "e", "file", {}, resumed_after, {"file": run}) as tracking:
            assert tracking.run_ids == {"file": run}
            for step in steps:
                tracking.log({"x": 0}, step=step)

    def found() -> list[tuple[str, int]]:
        return [(line["run"], line["step"]) for line in lines(Path("p/e.jsonl"))]

    write("A", 1)
    write("B", 1, 2, 3, 4)
    write("A", 2, 3, resumed_after=1)
    assert found() == [("A", 1), ("B", 1), ("B", 2), ("B", 3), ("B", 4), ("A", 2), ("A", 3)]
    write("A", 3, resumed_after=2)
    assert found()[5:] == [("A", 2), ("A", 3)]
    assert caplog.text == ""
    write("B", 4, resumed_after=3)
    assert found()[4:] == [("B", 4), ("A", 2), ("A", 3), ("B", 4)]
    assert "another run has written behind this one, so 1 lines of steps after 3 stay" in caplog.text


def test_lines_written_before_they_had_ids_are_of_a_run_without_one():
    Path("p").mkdir()
    Path("p/e.jsonl").write_text("".join(f'{{"step": {step}, "data": {{}}}}\n' for step in (1, 2, 3)))
    with Tracking("p", "e", "file", {}, resumed_after=1):
        assert [line["step"] for line in lines(Path("p/e.jsonl"))] == [1]


def test_a_service_goes_on_with_the_run_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch):
    cls = recorder()
    seen = []

    def start(self: Tracker, *arguments: object) -> None:
        self.run_id = os.environ.get("RECORDER_RUN", "made up")
        seen.append(self.run_id)

    cls.__init__ = start  # type: ignore[method-assign]
    cls.variables_of_run = classmethod(lambda cls, run_id: {"RECORDER_RUN": run_id})  # type: ignore[assignment]
    first = Tracking("p", "e", ["recorder", "file"], {})
    assert first.run_ids == {"recorder": "made up", "file": THIS_RUN}
    assert Tracking("p", "e", "recorder", {}, 3, {"recorder": "abc"}).run_ids == {"recorder": "abc"}
    assert "RECORDER_RUN" not in os.environ
    monkeypatch.setenv("RECORDER_RUN", "the user's")
    Tracking("p", "e", "recorder", {}, 3, {"recorder": "abc"})
    assert seen == ["made up", "abc", "the user's"]


def test_a_call_may_choose_trackers():
    recorder()
    tracking = Tracking("p", "e", ["recorder", "file"], {})
    tracking.log({"x": 1}, step=1, backend="file")
    tracking.log({"x": 2}, step=2, backend=["recorder", "wandb"])
    tracking.finish()
    assert [line["step"] for line in lines(Path("p/e.jsonl"))] == [1]


def test_names_are_checked():
    assert set(Tracking.supported_backend) >= {
        "console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "clearml", "trackio", "vemlp_wandb",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"unknown tracker 'tensorbord'.*Did you mean 'tensorboard'"):
        Tracking("p", "e", ["console", "tensorbord"], {})
    with pytest.raises(ConfigError, match=r"'vemlp_wandb' needs the client of Volcengine.*Use 'wandb'"):
        require_trackers("vemlp_wandb")


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    for name in ("wandb", "tracking"):
        with pytest.raises(ConfigError, match=r"package 'wandb', which is not installed. Run `pip install wandb`"):
            require_trackers(["console", name])


# ---- the file tracker --------------------------------------------------------------------------


def test_file_tracker_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "deep" / "log.jsonl"))
    tracking = Tracking("p", "e", "file", {})
    tracking.log({"a": 0.1, "b": math.nan, "c": -math.inf}, step=3)
    (first,) = lines(tmp_path / "deep" / "log.jsonl")  # already on the disk
    assert (first["step"], first["data"]) == (3, {"a": 0.1, "b": None, "c": None})
    tracking.log_table("t", ["x"], [[math.nan], [1]], step=3)
    assert lines(tmp_path / "deep" / "log.jsonl")[1]["rows"] == [{"x": None}, {"x": 1}]
    tracking.finish()
    Tracking("p", "e", "file", {}).log({"a": 0.2}, step=4)
    assert [line["step"] for line in lines(tmp_path / "deep" / "log.jsonl")] == [3, 3, 4]


def test_file_tracker_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    Tracking("proj", "exp", "file", {}).log({"a": 1}, step=1)
    assert (tmp_path / "logs" / "proj" / "exp.jsonl").exists()


def test_settings_checkpoints_and_the_end_stand_beside_the_metrics():
    config = {"model": {"api_key": "sk-0123456789abcdef", "path": "tiny"}}
    with Tracking("p", "e", ["file", "console"], config) as tracking:
        tracking.log({"x": 1}, step=1)
        tracking.log_event("checkpoint", step=1, folder="here")
    error = ValueError("broken\nby intent")
    error.add_note("On the command line: x")
    run = Tracking("p", "e", "file", config, 1)
    with pytest.raises(ValueError, match="broken"), run, StepContext(3).stage("gen"):
        raise error
    events = lines(Path("p/e.run.jsonl"))
    assert [event["event"] for event in events] == ["start", "checkpoint", "end", "start", "resume", "end"]
    assert events[0]["config"] == {"model": {"api_key": "***", "path": "tiny"}}
    assert events[0]["pid"] == os.getpid()
    assert (events[1]["step"], events[1]["folder"], events[4]["step"]) == (1, "here", 1)
    why = "ValueError: broken This happened in stage 'gen' of step 3."
    assert [(events[i]["status"], events[i]["why"]) for i in (2, 5)] == [("done", ""), ("failed", why)]


def test_an_unwritable_file_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "taken").write_text("a file, not a folder")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "taken" / "log.jsonl"))
    with pytest.raises(ConfigError, match=r"tracker 'file' cannot write .*taken/log.jsonl.*VERL_FILE_LOGGER_PATH"):
        Tracking("p", "e", "file", {})


SAMPLES = [{"input": "2+2", "output": "4\nor so", "gts": "4", "score": 1.0, "step": 9, "more": "x"}]


def test_generations_become_a_table():
    with Tracking("p", "tables", ["console", "file"], {}) as tracking:
        ValidationGenerationsLogger(tracking=tracking).log(None, SAMPLES, step=7)
        ValidationGenerationsLogger("p", "tables").log(["console", "file"], [("in", "out", 0.5)], 8)
        ValidationGenerationsLogger().log(["console"], [("in", "out", 0.5)], 8)
        ValidationGenerationsLogger().log(None, [], step=9)
        with pytest.raises(ConfigError, match="no open trackers of project_name=p, experiment_name=other"):
            ValidationGenerationsLogger("p", "other").log("console", SAMPLES, 9)
    with pytest.raises(ConfigError, match="no open trackers"):
        ValidationGenerationsLogger("p", "tables").log("console", SAMPLES, 9)
    assert lines(Path("p/tables.jsonl")) == [
        {"step": 7, "table": "val/generations",
         "rows": [{"step": 7, "input": "2+2", "output": "4\nor so", "gts": "4", "score": 1.0}], "run": THIS_RUN},
        {"step": 8, "table": "val/generations", "rows": [{"step": 8, "input": "in", "output": "out", "score": 0.5}],
         "run": THIS_RUN},
    ]  # fmt: skip


# ---- secrets -----------------------------------------------------------------------------------


def test_secrets_are_masked_and_settings_are_not():
    settings = {
        "ppo_max_token_len_per_gpu": 16384,
        "prompt_key": "prompt",
        "reward_fn_key": "data_source",
        "tokenizer_path": "/models/qwen",
        "hf_token": "hf_abcdefgh",
        "model": {"api_key": "short", "trust_remote_code": True, "access_token": None},
        "env_vars": {
            "WANDB_API_KEY": "0123456789abcdef",
            "HF_TOKEN": "x",
            "DB_PASSWORD": 12345,
            "OMP_NUM_THREADS": "1",
        },
        "signing_key": "a8f5f167f44f4964e6c998dee827110c",
        "credentials": {"user": "me", "password": "p"},
        "urls": ["https://user:pass@host/x", "https://host/x"],
    }
    assert without_secrets(settings) == {
        "ppo_max_token_len_per_gpu": 16384,
        "prompt_key": "prompt",
        "reward_fn_key": "data_source",
        "tokenizer_path": "/models/qwen",
        "hf_token": "***",
        "model": {"api_key": "***", "trust_remote_code": True, "access_token": None},
        "env_vars": {"WANDB_API_KEY": "***", "HF_TOKEN": "***", "DB_PASSWORD": "***", "OMP_NUM_THREADS": "1"},
        "signing_key": "***",
        "credentials": "***",
        "urls": ["https://***@host/x", "https://host/x"],
    }
    assert settings["hf_token"] == "hf_abcdefgh"


def test_trackers_never_see_a_secret():
    recorder()
    tracking = Tracking("p", "e", "recorder", {"a": {"password": "hunter2"}, "lr": 1e-6})
    assert tracking.trackers["recorder"].start == ("p", "e", {"a": {"password": "***"}, "lr": 1e-6})


def test_flatten_and_markdown_by_hand():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert markdown_table(["a", "b"], [["x|y", "1\n2"]]) == "| a | b |\n| --- | --- |\n| x\\|y | 1<br>2 |"


def test_the_recorded_command_can_be_pasted_and_has_no_secret(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = [
        "python3",
        "-m",
        "verl.trainer.main_ppo",
        "data.train_files=[a.jsonl, b.jsonl]",
        "x.token=hf_abcdefgh12345678",
    ]
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.setattr(sys, "argv", ["verl train", "++data.train_files=[a.jsonl, b.jsonl]"])
    with Tracking("p", "e", ["file"], {"x": {"token": "hf_abcdefgh12345678"}}):
        pass
    [record, *_] = (json.loads(line) for line in next(Path("p").glob("*.run.jsonl")).read_text().splitlines())
    assert shlex.split(record["command"]) == [*typed[:4], "x.token=***"]
