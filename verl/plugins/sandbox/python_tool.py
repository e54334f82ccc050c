"""A Python interpreter as a tool, with variables that stay from call to call of a trajectory."""

from __future__ import annotations

import os
import threading

from verl.base.types import JsonObject
from verl.plugins.sandbox.interpreter import Interpreter, keeps_variables
from verl.plugins.sandbox.types import Limits
from verl.tools.base_tool import BaseTool, schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.threads import in_thread

LIMITS = {"wall_s": 10.0, "cpu_s": 120, "memory_mb": 512, "max_processes": 16, "max_output_bytes": 1 << 18}
"""Defaults of the limits of a program; its output is cut, because all of it goes into the context."""
SPARE_S = 60.0
"""Seconds that a call may take beside its code: the start of an interpreter on a busy machine."""


class PythonTool(BaseTool):
    """Run code in an interpreter of the trajectory's own, in the sandbox of this machine.

    Variables, imports and files in /tmp stay until the trajectory ends, or until code reaches a limit or ends its
    process; the answer then says that they are gone. Code sees the standard library, and no network.

    Its ``config``: ``wall_s`` (10) and ``max_output_bytes`` of one call; ``cpu_s`` (120), ``memory_mb`` (512) and
    ``max_processes`` (16) of all calls together; ``max_concurrent`` calls at once (the number of cores).
    """

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.limits = Limits(**{key: type(default)(config.get(key, default)) for key, default in LIMITS.items()})
        defaults = {"max_concurrent": os.cpu_count() or 1, "timeout_s": self.limits.wall_s + SPARE_S}
        super().__init__({**defaults, **config}, tool_schema)
        Interpreter().close()  # says before the run if this machine has no sandbox
        self._lock = threading.Lock()
        self._interpreters: dict[str, Interpreter] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """See :meth:`BaseTool.get_openai_tool_schema`."""
        return self.tool_schema or schema(
            "python",
            "Run Python code and return what it prints and the value of its last expression. Variables stay.",
            ["code"],
            code={"type": "string", "description": "Python code. Only the standard library can be imported."},
        )

    async def create(self, instance_id: str | None = None, **kwargs: object) -> tuple[str, ToolResponse]:
        """Prepare an interpreter; it starts at the first call."""
        instance_id, response = await super().create(instance_id)
        with self._lock:
            self._interpreters[instance_id] = Interpreter(self.limits)
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: object
    ) -> tuple[ToolResponse, float, JsonObject]:
        """Run ``parameters["code"]``."""
        result = await in_thread(self._interpreters[instance_id].run, parameters["code"])
        text = result.stdout
        if not keeps_variables(result):
            text += f"[The interpreter ended: {result.reason}. It starts anew, and its variables are gone.]"
        return ToolResponse(text=text), 0.0, {"python_error": 0.0 if result.ok else 1.0}

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """End the interpreter with all its processes."""
        with self._lock:
            interpreter = self._interpreters.pop(instance_id, None)
        if interpreter is not None:
            await in_thread(interpreter.close)
