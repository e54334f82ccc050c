"""Tools of real MCP servers, over stdio and over HTTP: their calls, their errors, and their deaths."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.agents.test_tool_calls import shorten
from tests.support.ports import reserved_port
from tests.support.vision_models import tiny_vision_model_dir
from verl.agents.parsers import FunctionCall
from verl.agents.tool_calls import CallFailure, ToolCallResult, ToolLimits, ToolRunner
from verl.errors import ConfigError
from verl.tools.base_tool import BaseTool
from verl.tools.mcp_base_tool import MCPBaseTool
from verl.tools.utils.tool_registry import initialize_tools_from_config
from verl.utils import hf_processor
from verl.vision.prompts import ImagePrompts

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": sys.executable, "args": [SERVER], "env": {"TOKEN_OF_TEST": "${SECRET_OF_TEST}"}}


def made(folder: Path, servers: dict[str, Any], selected: str = "null", config: str = "{type: mcp}") -> list[BaseTool]:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    (folder / "tools.yaml").write_text(
        "tools:\n  - class_name: verl.tools.mcp_base_tool.MCPBaseTool\n"
        f"    config: {config}\n"
        f"    mcp: {{mcp_servers_config_path: {folder}/servers.json, tool_selected_list: {selected}}}\n"
    )
    return initialize_tools_from_config(str(folder / "tools.yaml"))


def calls(
    tools: list[BaseTool], *made: tuple[str, dict[str, Any]], images: ImagePrompts | None = None
) -> list[ToolCallResult]:
    """One trajectory."""

    async def trajectory() -> list[ToolCallResult]:
        runner = ToolRunner(tools, shorten, ToolLimits(max_response_tokens=300))
        async with runner.session(images=images) as session:
            return [await session.call(FunctionCall(name=n, arguments=json.dumps(a))) for n, a in made]

    return asyncio.run(trajectory())


@pytest.fixture(scope="module")
def stdio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BaseTool]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_TEST", "s3cret")
        tools = made(
            tmp_path_factory.mktemp("stdio"), {"tests": STDIO}, config="{type: mcp, timeout: 50, rate_limit: 8}"
        )
    yield tools
    close(tools)


def close(tools: list[BaseTool]) -> None:
    assert isinstance(tools[0], MCPBaseTool)
    assert tools[0].connection is not None
    tools[0].connection.close()


def test_calls_and_errors_of_a_server(stdio: list[BaseTool]):
    names = ["add", "counted", "fail", "die", "die_once", "die_soon", "sleep", "flood", "look"]
    assert [tool.name for tool in stdio] == names
    add = stdio[0].tool_schema.to_template()["function"]
    assert (add["description"], add["parameters"]["required"]) == ("Add two numbers.", ["a"])
    assert add["parameters"]["properties"]["b"] == {"default": 1, "title": "B", "type": "integer"}
    assert (stdio[6].config["timeout_s"], stdio[6].config["max_concurrent"]) == (50, 8)
    stdio[6].config["timeout_s"] = 0.3
    found = calls(
        stdio,
        ("add", {"a": 2, "b": 3}),
        ("add", {"a": "two"}),
        ("fail", {}),
        ("sleep", {"seconds": 1.5}),
        ("add", {"a": 1}),
        ("flood", {"characters": 5_000_000}),
    )
    assert [one.failure for one in found] == [
        None, CallFailure.WRONG_ARGUMENTS, CallFailure.RAISED, CallFailure.TIMEOUT, None, None,
    ]  # fmt: skip
    assert found[0].response.text == "5"
    assert "the tool fail failed: McpToolError: Error executing tool fail" in (found[2].response.text or "")
    assert found[4].response.text == "2"
    assert (len(found[5].response.text or ""), found[5].is_truncated) == (300, True)


def test_pictures_of_a_server(stdio: list[BaseTool], tmp_path: Path):
    [for_text] = calls(stdio, ("look", {}))
    assert for_text.failure is CallFailure.WRONG_RESULT
    assert "the tool look, image 0: a message has an image, and the policy reads no images" in (
        for_text.response.text or ""
    )
    maker = ImagePrompts.from_processor(hf_processor(tiny_vision_model_dir(tmp_path)))
    kinds = ("good", "broken", "other", "huge")
    good, *bad = calls(stdio, *(("look", {"kind": kind}) for kind in kinds), images=maker)
    assert (good.failure, good.response.text) == (None, "see")
    assert [part["image"]["image_grid_thw"].tolist() for part in good.shown] == [[[1, 4, 6]]]
    reasons = ("base64 text of an image is damaged", "data:image/svg", "it has 8000 x 8001 pixels")
    for result, reason in zip(bad, reasons, strict=True):
        assert result.failure is CallFailure.WRONG_RESULT
        assert reason in (result.response.text or "")


def test_one_server_serves_many_threads(stdio: list[BaseTool]):
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.extend(one.response.text or "" for one in calls(stdio, ("counted", {}))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [f"{n} s3cret" for n in range(1, 9)]


@pytest.mark.slow
def test_a_server_that_dies_is_started_again(stdio: list[BaseTool]):
    calls(stdio, ("counted", {}))
    [before] = calls(stdio, ("counted", {}))
    assert not (before.response.text or "").startswith("1 ")
    died, after = calls(stdio, ("die", {}), ("counted", {}))
    assert died.failure is CallFailure.RAISED
    assert "the MCP server 'tests' was lost in the call; it is connected again for the next one." in (
        died.response.text or ""
    )
    assert (after.failure, after.response.text) == (None, "1 s3cret")  # a new process
    # Between two calls: nothing was under way, so nothing fails.
    [soon] = calls(stdio, ("die_soon", {}))
    assert soon.response.text == "soon"
    time.sleep(0.6)
    [after] = calls(stdio, ("counted", {}))
    assert (after.failure, after.response.text) == (None, "1 s3cret")


@pytest.mark.slow
def test_a_server_that_dies_while_it_starts_is_started_once_more(tmp_path: Path):
    mark = tmp_path / "mark"
    script = f"rm '{mark}' 2>/dev/null && exit 1; exec '{sys.executable}' '{SERVER}'"
    tools = made(tmp_path, {"tests": {"command": "sh", "args": ["-c", script]}})
    calls(tools, ("die", {}))
    mark.touch()
    [found] = calls(tools, ("counted", {}))
    assert (found.failure, found.response.text, mark.exists()) == (None, "1 None", False)
    close(tools)


@pytest.mark.slow
def test_a_call_that_does_no_harm_twice_is_made_again_when_its_server_dies(stdio: list[BaseTool], tmp_path: Path):
    [found] = calls(stdio, ("die_once", {"mark": str(tmp_path / "mark")}))
    assert (found.failure, found.response.text) == (None, "alive")


def serve(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    process.kill()
    raise TimeoutError("the server does not start")


def test_a_server_over_http_and_its_restart(tmp_path: Path):
    port = reserved_port()
    process = serve(port)
    try:
        settings = {"url": f"http://127.0.0.1:{port}/mcp", "auth_token": "abc"}
        tools = made(tmp_path, {"remote": settings}, selected="[add, die, counted]")
        assert [tool.name for tool in tools] == ["add", "counted", "die"]
        found = calls(tools, ("add", {"a": 2}), ("counted", {}), ("die", {}))
        assert [one.response.text for one in found[:2]] == ["3", "1 None"]
        assert "the MCP server 'remote' was lost in the call" in (found[2].response.text or "")
        process.wait(10)
        [gone] = calls(tools, ("add", {"a": 2}))
        assert "the MCP server 'remote' cannot be reached: ConnectError" in (gone.response.text or "")
        process = serve(port)
        found = calls(tools, ("counted", {}), ("add", {"a": 4}))
        assert [one.response.text for one in found] == ["1 None", "5"]
        # A restart between two calls.
        process.kill()
        process.wait(10)
        process = serve(port)
        [after] = calls(tools, ("counted", {}))
        assert after.response.text == "1 None"
        close(tools)
    finally:
        process.kill()
        process.wait(10)


def test_servers_that_cannot_be_used(tmp_path: Path):
    exits = {"command": sys.executable, "args": ["-c", "raise SystemExit(3)"]}
    cases = [
        ({"a": exits}, "null", "the MCP server 'a' cannot be reached"),
        ({"a": {"command": "/no/such/program"}}, "null", "FileNotFoundError"),
        ({"a": {"url": f"http://user:pass@127.0.0.1:{reserved_port()}/mcp"}}, "null", "ConnectError"),
        ({"a": {"args": []}}, "null", "needs either 'command' (stdio) or 'url'"),
        ({"a": {"comand": "x"}}, "null", "unknown key 'comand'. Did you mean 'command'?"),
        ({"a": STDIO}, "[add, subtract]", "no server has the tools subtract of mcp.tool_selected_list"),
        ({}, "null", "must have the form"),
    ]
    for servers, selected, message in cases:
        with pytest.raises(ConfigError) as error:
            made(tmp_path, servers, selected)
        assert message in str(error.value)
        assert "tools.yaml: tools[0]" in str(error.value) or "the MCP server 'a'" in str(error.value)
        assert "user:pass" not in str(error.value)


@pytest.mark.slow
def test_a_closed_connection_leaves_no_process(tmp_path: Path):
    def servers() -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child.is_running() and SERVER in child.cmdline()]

    before = len(servers())
    tools = made(tmp_path, {"tests": STDIO})
    assert len(servers()) == before + 1
    close(tools)
    assert len(servers()) == before


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "verl.tools.utils.mcp_clients", raising=False)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"tools\[0\]: .* pip install 'mcp"):
        made(tmp_path, {"tests": STDIO})
