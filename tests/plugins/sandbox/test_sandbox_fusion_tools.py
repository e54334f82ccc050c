"""Whole programs as a tool: in the sandbox of this machine, and on a service."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.plugins.sandbox.fusion_server import service
from tests.plugins.sandbox.requirements import needs_sandbox
from verl.plugins.sandbox.sandbox_fusion_tools import SandboxFusionTool

pytestmark = needs_sandbox


def execute(tool: SandboxFusionTool, code: str, **parameters: Any):
    async def call():
        instance, _ = await tool.create(create_kwargs={"ground_truth": "1"})
        try:
            return await tool.execute(instance, {"code": code, **parameters}), await tool.calc_reward(instance)
        finally:
            await tool.release(instance)

    (response, reward, metrics), score = asyncio.run(call())
    assert (reward, metrics, score) == (None, None, 0.0)
    return response.text


def test_programs_in_the_sandbox_here():
    tool = SandboxFusionTool({"num_workers": 4, "rate_limit": 2, "default_timeout": 5, "memory_limit_mb": 128})
    assert tool.num_workers == 2
    assert execute(tool, "print(6 * 7)") == "42\n"
    assert execute(tool, "print(1)\n1 / 0").endswith("ZeroDivisionError: division by zero\n")
    assert execute(tool, "while True: pass", timeout=0.5) == "[timeout]"
    with pytest.raises(ValueError, match="the language 'rust' needs sandbox_fusion_url"):
        execute(tool, "fn main() {}", language="rust")
    assert tool._instance_dict == {}


def test_programs_on_a_service_and_a_subclass_as_public_recipes_write_it():
    class OfTheRecipe(SandboxFusionTool):
        """Takes a program out of a block of markdown."""

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
            code = re.findall(r"```py(.*?)```", parameters["code"], re.DOTALL)[0]
            result = await self.execution_pool.execute.remote(
                self.execute_code, instance_id, code, self.default_timeout, self.default_language
            )
            return result, None, None

    with service() as server:
        tool = OfTheRecipe({"sandbox_fusion_url": server.url + "/run_code", "default_timeout": 7})
        assert execute(tool, "Look:\n```py\nprint('hello')\n```") == "hello\n"
        assert [(body["language"], body["run_timeout"], body["memory_limit_MB"]) for body in server.requests] == [
            ("python", 7.0, 1024)
        ]
