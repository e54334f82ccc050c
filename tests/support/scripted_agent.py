"""An agent whose tool calls stand in the rows, for runs of tiny random policies, which write none; and tools for it.

Rows with ``agent_name: program`` are answered by programs instead (:mod:`tests.support.scripted_programs`).

The rest is that of :class:`verl.agents.tool_agent.ToolAgentLoop`: the policy draws every turn, and after turn ``i`` the
calls of ``row["script"][i]`` are made. ``settings(folder)`` writes the files and returns the overrides of a run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.agents.loop import AgentLoopOutput
from verl.agents.parsers import FunctionCall
from verl.agents.parsers.base import ToolParser
from verl.agents.tool_agent import ToolAgentLoop
from verl.tools.function_tool import function_tool

Script = list[list[list[str]]]
"""Of each turn, name and arguments (a text) of each call."""
TOOL_TIMEOUT_S = 20
STOP_TOKEN_IDS = str([*range(4, 104, 3)]).replace(" ", "")
"""Of 104 tokens one in three ends a turn, so that a random policy does end its turns."""
MCP_SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("tests", log_level="CRITICAL")

@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def shout(text: str) -> str:
    "Say it louder."
    return text.upper() + "!"

@server.tool()
def die() -> str:
    "End the server in the middle of a call."
    os._exit(1)

server.run("stdio")
"""


class ScriptedAgent(ToolAgentLoop):
    """Makes the calls of its row."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """See :meth:`AgentLoopBase.run`."""
        self.tool_parser = _ScriptParser(self.tokenizer, json.loads(kwargs["script"]))
        return await super().run(sampling_params, **kwargs)


class _ScriptParser(ToolParser):
    """Gives the calls of the script, whatever the policy drew."""

    def __init__(self, tokenizer: Any, script: Script) -> None:
        super().__init__(tokenizer)
        self._left = iter(script)

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """See :meth:`ToolParser.extract_tool_calls`."""
        calls = [FunctionCall(name=name, arguments=arguments) for name, arguments in next(self._left, [])]
        return self.tokenizer.decode(responses_ids, skip_special_tokens=True), calls


# ---- tools, good and bad


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the one.
        b: the other.
    """
    return a + b


@function_tool
def fail(how: str) -> Any:
    """Do what tools should not.

    Args:
        how: name of the deed.
    """
    deeds = {
        "raise": lambda: {}["no such key"],
        "exit": lambda: sys.exit(3),
        "hang": lambda: time.sleep(3 * TOOL_TIMEOUT_S),
        "flood": lambda: "tool result " * (100 * 2**20 // 12),
        "bytes": lambda: b"\0\xff" * 100,
        "surrogate": lambda: "a\ud800b",
        "end the process": lambda: os._exit(7),
        "stop the process": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "fork": _fork,
    }
    return deeds[how]()


@function_tool(name="fail_apart", isolated=True, timeout_s=TOOL_TIMEOUT_S, memory_mb=512)
def fail_apart(how: str) -> Any:
    """Do what tools should not, in a process of their own.

    Args:
        how: name of the deed.
    """
    deeds = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "fork": _fork, "hang": lambda: time.sleep(60)}
    return deeds[how]()


def _fork() -> str:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return "forked"


# ---- rows and settings


def call(name: str, **arguments: Any) -> list[str]:
    """Write a call."""
    return [name, json.dumps(arguments)]


BAD_CALLS: Mapping[str, list[str]] = {
    "raise": call("fail", how="raise"),
    "exit": call("fail", how="exit"),
    "hang": call("fail", how="hang"),
    "flood": call("fail", how="flood"),
    "bytes": call("fail", how="bytes"),
    "surrogate": call("fail", how="surrogate"),
    "wrong type": call("add", a="one", b=[2]),
    "no object": ["add", "[1, 2]"],
    "no JSON": ["add", '{"a": 1'],
    "unknown tool": call("subtract", a=1, b=1),
    "killed process": call("fail_apart", how="kill"),
    "forked process": call("fail_apart", how="fork"),
    "hanging process": call("fail_apart", how="hang"),
    "server that dies": call("die"),
}
"""Calls of a tool that go wrong, each of which costs its own conversation an error message at most."""


def good_script(number: int) -> Script:
    """Two turns with a call, of a tool in the process and of an MCP server by turns, and one that ends."""
    return [[call("add", a=number, b=1)], [call("shout", text=str(number)) if number % 2 else call("add", a=1, b=1)]]


def settings(folder: Path) -> dict[str, object]:
    """Write the files of tools and loops; return overrides of a run whose rows have a ``script``."""
    (folder / "server.py").write_text(MCP_SERVER)
    server = {"command": sys.executable, "args": [str(folder / "server.py")]}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"tests": server}}))
    (folder / "tools.yaml").write_text(
        "tools:\n- class_name: verl.tools.mcp_base_tool.MCPBaseTool\n  config: {type: mcp, timeout: 60}\n"
        f"  mcp: {{mcp_servers_config_path: {folder}/servers.json}}\n"
    )
    (folder / "loops.yaml").write_text(
        "- {name: scripted, _target_: tests.support.scripted_agent.ScriptedAgent}\n"
        "- {name: program, _target_: program_agent, program: tests.support.scripted_programs.program}\n"
    )
    rollout = "actor_rollout_ref__rollout__"
    return {
        "data__max_response_length": 64,
        f"{rollout}name": "native",
        f"{rollout}max_num_seqs": 32,
        f"{rollout}stop_token_ids": STOP_TOKEN_IDS,
        f"{rollout}multi_turn__tool_config_path": folder / "tools.yaml",
        f"{rollout}multi_turn__function_tool_path": __file__,
        f"{rollout}multi_turn__max_tool_response_length": 12,
        f"{rollout}multi_turn__tokenization_sanity_check_mode": "disable",
        f"{rollout}agent__agent_loop_config_path": folder / "loops.yaml",
        f"{rollout}agent__default_agent_loop": "scripted",
        f"{rollout}agent__tool_timeout_s": TOOL_TIMEOUT_S,
    }
