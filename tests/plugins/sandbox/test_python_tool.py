"""The interpreter as a tool: a state for each trajectory, and none left after it."""

from __future__ import annotations

import asyncio
import json
import threading

from tests.agents.test_tool_calls import shorten
from tests.plugins.sandbox.requirements import needs_sandbox
from verl.agents.parsers import FunctionCall
from verl.agents.tool_calls import ToolLimits, ToolRunner
from verl.plugins.sandbox.python_tool import PythonTool

pytestmark = needs_sandbox


def test_each_trajectory_has_its_own_variables():
    tool = PythonTool({"wall_s": 20, "memory_mb": 128})
    assert (tool.limits.memory_mb, tool.config["timeout_s"]) == (128, 80.0)
    runner = ToolRunner([tool], shorten, ToolLimits(max_response_tokens=500))
    printed: dict[int, list[str]] = {}

    async def trajectory(number: int) -> None:
        printed[number] = []
        async with runner.session() as session:
            for code in (f"x = {number}", "x = x * 10", "x", "import os; os._exit(1)", "print('x' in globals())"):
                result = await session.call(FunctionCall(name="python", arguments=json.dumps({"code": code})))
                assert result.failure is None
                printed[number].append(result.response.text or "")

    threads = [threading.Thread(target=lambda n=n: asyncio.run(trajectory(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gone = "[The interpreter ended: exit_error (1). It starts anew, and its variables are gone.]"
    assert printed == {number: ["", "", f"{number * 10}\n", gone, "False\n"] for number in range(4)}
    assert tool._interpreters == {}
