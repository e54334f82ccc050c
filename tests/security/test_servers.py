"""Servers that a run starts: on loopback, with a token that stands nowhere, and nobody without it is let in."""

from __future__ import annotations

import asyncio
import hmac
import importlib
import inspect
import json
import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import ray
import torch

from verl.errors import ConfigError, RolloutError
from verl.single_controller.ray import session
from verl.workers.config import RolloutConfig
from verl.workers.rollout.client import ENGINE_SIDE
from verl.workers.rollout.engine_kwargs import Launch, extra_arguments
from verl.workers.rollout.engine_process import EngineProcess, new_token
from verl.workers.rollout.engine_side.verl_engine import TOKEN_VARIABLE
from verl.workers.rollout.sglang_rollout.client import SGLangClient
from verl.workers.rollout.vllm_rollout.client import VLLMClient

ENGINE = """
import os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        told = self.headers["Authorization"] == "Bearer " + os.environ["ENGINE_TOKEN"]
        self.send_response(200 if self.path == "/health" or told else 401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

print("server_args=ServerArgs(api_key='%s')" % os.environ["ENGINE_TOKEN"], flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server() -> Iterator[EngineProcess]:
    token = new_token()
    server = EngineProcess(
        "test",
        lambda port: [sys.executable, "-c", ENGINE, str(port)],
        token=token,
        environment={"ENGINE_TOKEN": token},
        start_timeout_s=30,
    )
    server.start()
    yield server
    server.stop()


def family() -> list[psutil.Process]:
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def test_the_token_stands_on_no_command_line_and_in_no_message(server: EngineProcess):
    assert len(server.token) >= 32
    children = family()[1:]
    assert any(str(server.port) in process.cmdline() for process in children)
    for process in children:
        assert server.token not in " ".join(process.cmdline())
    assert server.token in server.log_path.read_text()  # engines write down how they were started
    assert server.token not in server.log_tail()
    assert "api_key='***'" in server.log_tail()
    assert server.token not in repr(server)
    server.stop()
    with pytest.raises(RolloutError) as caught:
        server.get("/x")
    assert server.token not in str(caught.value)


def test_what_the_server_has_belongs_to_this_account_alone(server: EngineProcess):
    for folder in (server.folder, server.memory_folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_it_listens_on_loopback_alone(server: EngineProcess):
    listening = [
        connection.laddr
        for process in family()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == server.port
    ]
    assert [address.ip for address in listening] == ["127.0.0.1"]


def test_tokens_are_never_the_same():
    assert len({new_token() for _ in range(100)}) == 100


# ---- the engines' own servers --------------------------------------------------------------------


class Recorder:
    """An interpreter that writes down how it was called, and ends."""

    def __init__(self, folder: Path) -> None:
        self.record = folder / "record.json"
        self.python = folder / "python"
        source = f"import json, os, sys\njson.dump([sys.argv, dict(os.environ)], open({str(self.record)!r}, 'w'))\n"
        self.python.write_text(f"#!{sys.executable}\n{source}")
        self.python.chmod(0o755)

    def called(self) -> tuple[str, dict[str, str]]:
        arguments, environment = json.loads(self.record.read_text())
        return " ".join(arguments), environment


def test_vllm_is_told_to_listen_on_loopback_and_has_its_token_in_the_environment(tmp_path: Path):
    recorder = Recorder(tmp_path)
    with pytest.raises(RolloutError, match="ended while it started") as caught:
        VLLMClient({"model": "m"}, torch.device("cpu"), Launch(str(recorder.python)))
    arguments, environment = recorder.called()
    token = environment[TOKEN_VARIABLE]
    assert "--host 127.0.0.1" in arguments
    assert "--middleware verl_vllm.RequireToken" in arguments
    assert len(token) >= 32
    assert token not in arguments
    assert token not in str(caught.value)


def test_sglang_has_its_token_in_the_environment(tmp_path: Path):
    recorder = Recorder(tmp_path)
    with pytest.raises(RolloutError, match="ended while it started"):
        SGLangClient({"tp_size": 1, "model_path": "m"}, {}, Launch(str(recorder.python), 30.0), torch.device("cpu"))
    arguments, environment = recorder.called()
    assert len(environment["VERL_ENGINE_TOKEN"]) >= 32
    assert environment["VERL_ENGINE_TOKEN"] not in arguments
    source = (ENGINE_SIDE / "verl_sglang_server.py").read_text()
    assert 'host="127.0.0.1"' in source


@pytest.mark.parametrize("name", ["hf_token", "api_key", "admin_api_key", "ssl_key_password"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_secret_for_an_engine_is_not_put_on_its_command_line(engine: Any, name: str):
    config = RolloutConfig(name=engine, engine_kwargs={engine: {name: "s3cret-Marked"}})
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.{engine}\.{name} is a secret.*environment") as caught:
        extra_arguments(config, decided=())
    assert "s3cret" not in str(caught.value)


@pytest.fixture
def verl_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as vLLM's processes import it, from a folder on their path."""
    monkeypatch.syspath_prepend(str(ENGINE_SIDE))
    return importlib.import_module("verl_vllm")


def ask(verl_vllm: ModuleType, path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> int:
    """Status of the answer to a request through the middleware; 200 is the server's own."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(verl_vllm.RequireToken(app)({"type": kind, "path": path, "headers": list(headers)}, None, send))
    return sent[0]["status"]


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret-token")
    return b"secret-token"


def test_who_has_the_token_is_let_in(verl_vllm: ModuleType, token: bytes):
    assert ask(verl_vllm, "/inference/v1/generate", (b"authorization", b"Bearer " + token)) == 200
    assert ask(verl_vllm, "/health") == 200


@pytest.mark.parametrize(
    "given",
    [b"", b"Bearer", b"Bearer ", b"Bearer secret-toke", b"Bearer secret-tokenx", b"bearer secret-token",
     b"secret-token", b"Bearer secret-token ", b"Basic secret-token", b"Bearer \xff\x00", b"Bearer None"],
)  # fmt: skip
def test_who_has_another_is_not(verl_vllm: ModuleType, token: bytes, given: bytes):
    for kind in ("http", "websocket"):
        assert ask(verl_vllm, "/collective_rpc", (b"authorization", given), kind=kind) == 401


@pytest.mark.parametrize(
    "path", ["/", "/health/", "//health", "/health/../sleep", "/HEALTH", "/metrics", "/docs", "/v1/models"]
)
def test_only_the_health_check_is_open(verl_vllm: ModuleType, token: bytes, path: str):
    assert ask(verl_vllm, path) == 401


def test_an_empty_token_is_no_token(verl_vllm: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(KeyError):
        ask(verl_vllm, "/x")


def test_tokens_are_compared_in_constant_time(verl_vllm: ModuleType):
    assert verl_vllm.hmac.compare_digest is hmac.compare_digest
    assert "compare_digest(authorization, self.expected)" in inspect.getsource(verl_vllm.RequireToken)


# ---- Ray -----------------------------------------------------------------------------------------


def test_the_dashboard_listens_on_loopback_unless_the_user_says_otherwise():
    assert inspect.signature(ray.init).parameters["dashboard_host"].default == "127.0.0.1"
    assert "dashboard_host" not in session.init_arguments({"num_cpus": 2})
    assert session.init_arguments({"dashboard_host": "0.0.0.0"})["dashboard_host"] == "0.0.0.0"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", session.MODE, session.TOKEN, session.TOKEN_PATH):
        monkeypatch.setenv(name, "")  # so that monkeypatch takes away what the test sets
        monkeypatch.delenv(name)
    return tmp_path


def test_the_token_of_ray_can_be_read_by_its_owner_alone(home: Path):
    path = home / ".ray" / "auth_token"
    session.prepare_token()
    token = path.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)  # as Ray itself writes it
    session.prepare_token()
    assert path.read_text() == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_what_the_user_has_set_for_ray_stays(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    session.prepare_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    session.prepare_token()
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"
    assert not (home / ".ray").exists()


def test_a_link_in_the_place_of_the_token_is_not_followed(home: Path):
    (home / ".ray").mkdir()
    (home / "elsewhere").write_text("")
    (home / ".ray" / "auth_token").symlink_to(home / "elsewhere")
    session.prepare_token()
    assert (home / "elsewhere").read_text() == ""
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_secrets_are_handed_to_ray_in_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    variables = {"WANDB_API_KEY": "s3cret", "NCCL_DEBUG": "INFO"}
    given = {"num_cpus": 1, "runtime_env": {"env_vars": variables, "pip": ["x"]}}
    left = session.secrets_to_environment(given)
    assert left == {"num_cpus": 1, "runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}, "pip": ["x"]}}
    assert os.environ["WANDB_API_KEY"] == "s3cret"
    assert given["runtime_env"]["env_vars"] == variables
    assert session.secrets_to_environment({"num_cpus": 1}) == {"num_cpus": 1}


RUN = """
import os, subprocess, sys
import psutil
from types import SimpleNamespace
from verl.single_controller.ray.session import run_task

STRANGER = '''
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
except Exception:
    print("REFUSED")
else:
    print("LET IN")
'''

class Runner:
    def run(self, config):
        import ray

        address = ray.get_runtime_context().gcs_address
        token = open(os.path.expanduser("~/.ray/auth_token")).read().strip()
        shown = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
        print("ON A COMMAND LINE", any(token in line for line in shown))
        folder = ray._private.worker._global_node.get_session_dir_path()
        found = subprocess.run(["grep", "-rlF", token, folder + "/logs"], capture_output=True, text=True).stdout
        print("IN LOGS", bool(found))
        for other in ("0" * 64, token):
            environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": other}
            command = [sys.executable, "-c", STRANGER, address]
            said = subprocess.run(command, env=environment, capture_output=True, text=True)
            print(said.stdout.strip())

run_task(Runner, None, SimpleNamespace(ray_init={"num_cpus": 1, "log_to_driver": False}, timeline_json_file=None))
"""


@pytest.mark.slow  # Ray tries for a while before it gives up
def test_a_stranger_is_not_let_into_the_ray_of_a_run(tmp_path: Path):
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    variables |= {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN)], env=variables, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stdout.splitlines() if line.isupper() or " " in line]
    assert lines == ["ON A COMMAND LINE False", "IN LOGS False", "REFUSED", "LET IN"], done.stderr
    assert "authentication is disabled" not in done.stderr
