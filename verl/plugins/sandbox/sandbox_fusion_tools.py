"""A tool that runs whole programs on a SandboxFusion service, or in the sandbox of this machine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

from verl.base.types import JsonObject
from verl.plugins.sandbox import Limits, ProgramResult, Sandbox
from verl.plugins.sandbox.fusion import FusionSandbox
from verl.tools.base_tool import BaseTool, created_with, schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.threads import in_thread

T = TypeVar("T")


class ExecutionPool:
    """Run functions in threads, at most ``num_workers`` at once: ``await pool.execute.remote(function, *args)``."""

    def __init__(self, num_workers: int) -> None:
        self._free = threading.BoundedSemaphore(num_workers)

    @property
    def execute(self) -> ExecutionPool:
        """Return itself, so that ``.execute.remote(...)`` works as with an actor of Ray."""
        return self

    def remote(self, function: Callable[..., T], *args: object, **kwargs: object) -> Coroutine[object, object, T]:
        """Start a call; await it for the result."""

        def limited() -> T:
            with self._free:
                return function(*args, **kwargs)

        return in_thread(limited)


class SandboxFusionTool(BaseTool):
    """Run the program ``code`` and answer with what it prints. Each call is a new process without memory of the last.

    Its ``config``: ``sandbox_fusion_url`` (empty: the sandbox of this machine, Python only), ``default_timeout`` (30
    seconds), ``default_language`` (``python``), ``memory_limit_mb`` (1024), ``num_workers`` (10 at once), and
    ``rate_limit``, a lower bound of that if ``enable_global_rate_limit``.
    """

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.sandbox_fusion_url: str = config.get("sandbox_fusion_url") or ""
        self.default_timeout = float(config.get("default_timeout", 30))
        self.default_language: str = config.get("default_language", "python")
        self.memory_limit_mb = int(config.get("memory_limit_mb", 1024))
        self.num_workers = int(config.get("num_workers", 10))
        if config.get("enable_global_rate_limit", True):
            self.num_workers = min(self.num_workers, int(config.get("rate_limit", self.num_workers)))
        self.execution_pool = ExecutionPool(self.num_workers)
        self._instance_dict: dict[str, JsonObject] = {}
        self._runners: dict[str, Sandbox | FusionSandbox] = {}
        """What runs programs, by language."""
        if not self.sandbox_fusion_url:
            self._runners["python"] = Sandbox(self.num_workers)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """See :meth:`BaseTool.get_openai_tool_schema`."""
        return self.tool_schema or schema(
            "code_interpreter",
            "Run a program and return what it prints.",
            ["code"],
            code={"type": "string", "description": "The program. It must print its results."},
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: object
    ) -> tuple[str, ToolResponse]:
        """See :meth:`BaseTool.create`."""
        instance_id, response = await super().create(instance_id)
        truth = ground_truth if ground_truth is not None else created_with(kwargs).get("ground_truth")
        self._instance_dict[instance_id] = {"response": "", "ground_truth": truth, "reward": 0.0}
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: object
    ) -> tuple[ToolResponse, float | None, JsonObject | None]:
        """Run ``parameters["code"]``, in ``language`` and for ``timeout`` seconds if they are given too."""
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        code = parameters.get("code", "")
        code = code if isinstance(code, str) else str(code)
        response = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return response, None, None

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """Run a program and wait for it.

        Raises:
            SandboxError: the service or the sandbox failed.
        """
        limits = Limits(wall_s=timeout, cpu_s=math.ceil(timeout), memory_mb=self.memory_limit_mb)
        if language not in self._runners:
            if not self.sandbox_fusion_url:
                raise ValueError(f"the language {language!r} needs sandbox_fusion_url; the sandbox here runs python.")
            self._runners[language] = FusionSandbox(self.sandbox_fusion_url, language=language)
        return ToolResponse(text=output_text(self._runners[language].run(code, limits=limits)))

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        """The reward that a subclass has put into ``_instance_dict[instance_id]["reward"]``; else 0."""
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """See :meth:`BaseTool.release`."""
        self._instance_dict.pop(instance_id, None)


def output_text(result: ProgramResult) -> str:
    """Return the output of a program, and how it ended unless it succeeded."""
    text = result.stdout + result.stderr
    # A traceback says it all; a limit that ended the program is seen nowhere else.
    return text if result.ok or result.stderr.strip() else f"{text}[{result.reason}]"
