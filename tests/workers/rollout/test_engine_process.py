"""A server process from start to end, its requests and failures. The engine is a small program of our own."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import eventually, is_alive
from verl.errors import EngineLostError, RolloutError
from verl.workers.rollout import engine_process
from verl.workers.rollout.engine_process import LOOPBACK, EngineProcess, HangLimits, new_token

ENGINE = r"""
import json, os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN, lock = "Bearer " + os.environ["ENGINE_TOKEN"], threading.Lock()
aborted, working, most, streams = threading.Event(), 0, 0, 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *args):
        pass

    def reply(self, status, body=None):
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            return self.reply(503 if MODE == "never ready" else 200)
        if self.headers["Authorization"] != TOKEN:
            return self.reply(401, {"error": "the token is missing"})
        if self.path == "/metrics":
            return self.reply(200, f"tokens {time.monotonic() if MODE == 'draws' else 0}")
        self.reply(200, {"working": working, "most": most, "streams": streams, "environment": dict(os.environ)})

    def do_POST(self):
        global working, most, streams
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != TOKEN:
            return self.reply(401, {"error": "the token is missing"})
        if self.path == "/double":  # the first asked is the last to answer
            time.sleep(body.get("delay", 0))
            self.reply(200, {"twice": body["x"] * 2})
        elif self.path == "/nothing":
            self.reply(200)
        elif self.path == "/large":
            self.reply(200, {"received": len(body["text"]), "text": "b" * body["wanted"]})
        elif body.get("refuse"):
            self.reply(400, {"error": {"message": "a temperature of -1 is no temperature"}})
        elif self.path == "/work":  # until all work is aborted
            with lock:
                working += 1
                most = max(most, working)
            aborted.wait(20)
            with lock:
                working -= 1
            self.reply(200, {"aborted": aborted.is_set()})
        elif self.path == "/abort":
            aborted.set()
            self.reply(200)
        elif self.path == "/fail":
            print("Traceback ...\nValueError: the seventh layer is missing\n", end="", flush=True)
            self.reply(500, {"error": "internal"})
        elif self.path == "/die":
            print("the engine's last words", flush=True)
            os._exit(7)
        elif self.path == "/spawn":  # a child that does not care for SIGTERM
            deaf = "from signal import *; import time; signal(SIGTERM, SIG_IGN); print(0, flush=True); time.sleep(60)"
            child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
            child.stdout.readline()
            self.reply(200, {"pid": child.pid})
        elif self.path == "/stream":
            with lock:
                streams += 1
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            try:
                for i in range(body["events"]):
                    self.wfile.write(b": a comment\n\ndata: " + json.dumps({"i": i}).encode() + b"\n\n")
                    self.wfile.flush()
                    time.sleep(0.01 * (i > 2))
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                pass
            finally:
                with lock:
                    streams -= 1


def leave(number, frame):
    open(os.environ["ENGINE_WAS_ASKED"], "w").close()
    os._exit(0)


PORT, MODE = int(sys.argv[1]), sys.argv[2]
if "ENGINE_WAS_ASKED" in os.environ:
    signal.signal(signal.SIGTERM, leave)
print("\n".join(f"line {i}" for i in range(100)), flush=True)
if MODE == "dies":
    sys.exit("RuntimeError: no room for the weights")
ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""

OWNER = """
import os, sys, time
from verl.workers.rollout import engine_process
from verl.workers.rollout.engine_process import EngineProcess

python, script, how = sys.argv[1:]
environment = {"ENGINE_TOKEN": "t"}
server = EngineProcess("test", lambda port: [python, script, port, "fine"], token="t", environment=environment)
server.start()
child = server.post("/spawn", {})["pid"]
print(server.port, child, server.folder, server.memory_folder, flush=True)
time.sleep(0 if how == "ends" else 60)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "engine.py"
    path.write_text(ENGINE)
    return path


def engine(script: Path, mode: str = "fine", **settings: Any) -> EngineProcess:
    token = settings.pop("token", new_token())
    environment = {"ENGINE_TOKEN": token} | settings.pop("environment", {})
    return EngineProcess(
        "test",
        lambda port: [sys.executable, str(script), str(port), mode],
        token=token,
        environment=environment,
        **settings,
    )


@pytest.fixture
def start(script: Path) -> Iterator[Callable[..., EngineProcess]]:
    started = []

    def make(mode: str = "fine", **settings: Any) -> EngineProcess:
        started.append(engine(script, mode, **settings))
        started[-1].start()
        return started[-1]

    yield make
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def server(script: Path) -> Iterator[EngineProcess]:
    """One for all tests that leave it as it was."""
    running = engine(script)
    running.start()
    yield running
    running.stop()


def folders_of(server: EngineProcess) -> list[Path]:
    return [server.folder, server.memory_folder]


# ---- start


def test_a_started_server_answers_and_a_stopped_one_leaves_nothing(start: Callable[..., EngineProcess]) -> None:
    server = start()
    assert server.is_running
    assert server.post("/double", {"x": 21}) == {"twice": 42}
    child = server.post("/spawn", {})["pid"]
    folders, port = folders_of(server), server.port
    assert all(folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    server.stop()
    assert not server.is_running
    assert not any(folder.exists() for folder in folders)
    eventually(lambda: not is_alive(child), "the end of the server's child, which does not care for SIGTERM")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port), timeout=5)
    server.stop()
    with pytest.raises(RolloutError, match=r"the test server does not run\. Start it first"):
        server.post("/double", {"x": 1})
    server.start()  # again
    assert server.post("/double", {"x": 1}) == {"twice": 2}


def test_one_that_ends_while_it_starts_is_an_error_with_the_end_of_its_log(script: Path) -> None:
    server = engine(script, "dies")
    with pytest.raises(RolloutError) as error:
        server.start()
    text = str(error.value)
    assert text.startswith("the test server ended while it started. The end of its log:\n")
    assert "RuntimeError: no room for the weights" in text
    assert f"{sys.executable} ended with status 1." in text
    # 40 lines: 3 of the end (the error, an empty line, the status), so line 63 to line 99
    assert re.findall(r"line (\d+)$", text, re.MULTILINE) == [str(i) for i in range(63, 100)]
    assert not server.is_running
    assert not any(folder.exists() for folder in folders_of(server))


def test_one_that_is_not_ready_in_time_is_ended(script: Path) -> None:
    server = engine(script, "never ready", start_timeout_s=3)
    with pytest.raises(RolloutError, match=r"was not ready after 3 s\. .*wait longer(.|\n)*line 99"):
        server.start()
    assert not server.is_running
    assert not any(folder.exists() for folder in folders_of(server))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, server.port), timeout=5)


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    server = EngineProcess("test", lambda port: [str(tmp_path / "python"), str(port)], token="t")
    with pytest.raises(RolloutError, match=rf"No such file or directory: '{tmp_path}/python'"):
        server.start()


def test_nobody_else_gets_the_port_before_the_server_listens(script: Path) -> None:
    tried = []

    def command(port: int) -> list[str]:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, port))
        tried.append(port)
        return [sys.executable, str(script), str(port), "fine"]

    server = EngineProcess("test", command, token="t", environment={"ENGINE_TOKEN": "t"})
    server.start()
    assert tried == [server.port]
    server.stop()
    with socket.socket() as other:  # free again
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((LOOPBACK, server.port))


def test_the_environment_is_changed_for_the_server_alone(
    start: Callable[..., EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_TEST_KEPT", "kept")
    monkeypatch.setenv("VERL_TEST_GONE", "gone")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody there: requests must not go by it
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = start(environment={"VERL_TEST_GONE": None, "VERL_TEST_NEW": "new"})
    seen = server.get("/state")["environment"]
    assert (seen.get("VERL_TEST_KEPT"), seen.get("VERL_TEST_GONE"), seen.get("VERL_TEST_NEW")) == ("kept", None, "new")
    assert "VERL_TEST_NEW" not in os.environ
    assert os.environ["VERL_TEST_GONE"] == "gone"


# ---- the token


def test_every_request_bears_the_token_which_no_command_line_shows(server: EngineProcess) -> None:
    assert server.get("/state")["working"] == 0
    for headers in ({}, {"Authorization": "Bearer guess"}):
        asked = urllib.request.Request(server.base_url + "/double", data=b'{"x": 1}', headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=10)
    children = psutil.Process().children(recursive=True)
    commands = [child.as_dict(["cmdline"], ad_value=[])["cmdline"] for child in children]  # some may have ended
    family = [command for command in commands if str(server.port) in command]
    assert len(family) == 3  # the guard, the one that waits for its end, and the server
    assert not any(server.token in word for command in family for word in command)
    assert len({new_token() for _ in range(100)}) == 100


# ---- requests


def test_answers_come_in_the_order_of_the_bodies(server: EngineProcess) -> None:
    bodies = [{"x": i, "delay": 0.05 * (i < 3)} for i in range(60)]
    assert server.post_many("/double", bodies) == [{"twice": 2 * i} for i in range(60)]
    assert server.post_many("/double", []) == []
    assert server.post("/nothing", {}) is None


def test_several_threads_may_ask_at_once(server: EngineProcess) -> None:
    found: dict[int, list[Any]] = {}

    def ask(first: int) -> None:
        found[first] = server.post_many("/double", [{"x": first + i} for i in range(20)])

    threads = [threading.Thread(target=ask, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == {100 * t: [{"twice": 2 * (100 * t + i)} for i in range(20)] for t in range(4)}


def test_large_bodies_go_both_ways(server: EngineProcess) -> None:
    answer = server.post("/large", {"text": "ä" * 5_000_000, "wanted": 20_000_000})
    assert answer["received"] == 5_000_000
    assert len(answer["text"]) == 20_000_000


def test_a_refusal_and_a_failure_say_why(server: EngineProcess) -> None:
    with pytest.raises(RolloutError) as refused:
        server.post("/work", {"refuse": True})
    expected = "the test server refused POST /work with status 400: a temperature of -1 is no temperature"
    assert str(refused.value) == expected
    with pytest.raises(RolloutError) as failed:
        server.post_many("/fail", [{}] * 3)
    assert "status 500: internal Errors in its log:\n    ValueError: the seventh layer is missing" in str(failed.value)
    assert str(failed.value).count("seventh") == 1  # said three times, shown once
    assert server.post("/double", {"x": 1}) == {"twice": 2}


def test_a_server_that_dies_at_work_is_an_error_with_its_last_words(start: Callable[..., EngineProcess]) -> None:
    server = start(max_connections=4)
    with pytest.raises(RolloutError) as error:
        server.post_many("/die", [{}] * 10)
    for part in ("the test server broke a connection", "the engine's last words", "ended with status 7."):
        assert part in str(error.value)
    assert not server.is_running
    with pytest.raises(RolloutError, match=r"the test server does not run\.(.|\n)*last words"):
        server.post("/double", {"x": 1})


def test_an_answer_that_does_not_come_in_time_is_an_error(start: Callable[..., EngineProcess]) -> None:
    server = start(request_timeout_s=0.3)
    with pytest.raises(RolloutError, match=r"the test server did not answer within 0.3 s\."):
        server.post("/work", {})


# ---- cancellation


def test_cancelled_requests_are_ended_by_the_server_and_others_not_sent(start: Callable[..., EngineProcess]) -> None:
    server = start(max_connections=3)
    cancelled = threading.Event()

    def cancel_at_work() -> None:
        eventually(lambda: server.get("/state")["working"] == 3, "three requests at work")
        cancelled.set()

    thread = threading.Thread(target=cancel_at_work)
    thread.start()
    answers = server.post_many("/work", [{}] * 10, cancelled=cancelled, cancel=("/abort", {}))
    thread.join()
    assert answers.count({"aborted": True}) == 3
    assert answers.count(None) == 7
    assert server.get("/state")["most"] == 3  # never more than max_connections
    assert server.post_many("/double", [{"x": 1}] * 2) == [{"twice": 2}] * 2


def test_an_error_leaves_no_request_behind(start: Callable[..., EngineProcess]) -> None:
    """The refused one is everyone's error, and nobody waits for those that still work."""
    server = start(max_connections=2)
    with pytest.raises(RolloutError, match="refused"):
        server.post_many("/work", [{}, {"refuse": True}, {}])
    assert server.post_many("/double", [{"x": 1}] * 2) == [{"twice": 2}] * 2


def test_streams_come_event_by_event_until_no_more_are_wanted(server: EngineProcess) -> None:
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def take(number: int, event: Any) -> bool:
        taken[number].append(event["i"])
        return number == 1 and event["i"] == 1

    server.stream_many("/stream", [{"events": 3}, {"events": 100_000}, {"events": 5}], take)
    assert taken == {0: [0, 1, 2], 1: [0, 1], 2: [0, 1, 2, 3, 4]}
    eventually(lambda: server.get("/state")["streams"] == 0, "the end of the stream that nobody reads")


def test_cancelled_streams_are_closed(server: EngineProcess) -> None:
    cancelled, taken = threading.Event(), []

    def take(number: int, event: Any) -> bool:
        taken.append(number)
        if taken.count(0) >= 2 and taken.count(1) >= 2:
            cancelled.set()
        return False

    server.stream_many("/stream", [{"events": 100_000}] * 2, take, cancelled=cancelled)
    assert len(taken) < 1000
    eventually(lambda: server.get("/state")["streams"] == 0, "the end of both streams")
    server.stream_many("/stream", [{"events": 1}], lambda number, event: pytest.fail("sent"), cancelled=cancelled)
    with pytest.raises(RolloutError, match="status 400: a temperature of -1"):
        server.stream_many("/stream", [{"refuse": True}], lambda number, event: False)


# ---- the end


def is_refused(port: int) -> bool:
    with socket.socket() as client:  # a new one each time: one that was let in is connected, whatever comes
        return client.connect_ex((LOOPBACK, port)) == errno.ECONNREFUSED


@pytest.mark.parametrize("how", ["killed", "killed after its guard", "ends"])
def test_the_server_does_not_outlive_its_owner(how: str, script: Path, tmp_path: Path) -> None:
    """Killed by SIGKILL, as by Ray, or at its end without ``stop``: no process, no folder, no port is left.

    Only an owner that still lives leaves it time to end in good order.
    """
    asked = tmp_path / "asked"
    command = [sys.executable, "-c", OWNER, sys.executable, str(script), how]
    environment = os.environ | {"ENGINE_WAS_ASKED": str(asked)}
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    port, child, *folders = owner.stdout.readline().split()
    assert len(folders) == 2
    if how != "ends":
        assert is_alive(int(child))
        assert all(Path(folder).is_dir() for folder in folders)
        (guard,) = psutil.Process(owner.pid).children()
        if how == "killed after its guard":
            guard.kill()
        owner.send_signal(signal.SIGKILL)
    owner.wait(timeout=30)
    eventually(lambda: not is_alive(int(child)), "the end of the server's child")
    eventually(lambda: not any(Path(folder).exists() for folder in folders), "the end of its folders")
    eventually(lambda: is_refused(int(port)), "the end of its port")  # its child may end before the server itself
    assert asked.exists() == (how == "ends")


@pytest.mark.parametrize("mode", ["draws", "fine"])
def test_an_answer_may_take_long_while_the_server_draws_tokens(
    start: Callable[..., EngineProcess], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(engine_process, "_CHECK_S", 0.05)
    limits = HangLimits(answer_s=0.5)
    server = start(mode, hang_limits=limits, metrics=("/metrics", ('"tokens',)))
    if mode == "draws":
        assert server.post("/double", {"x": 1, "delay": 1}) == {"twice": 2}
    else:
        with pytest.raises(EngineLostError, match=r"gave no answer to any request for 0\.5 s"):
            server.post("/double", {"x": 1, "delay": 1})
