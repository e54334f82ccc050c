"""Typed Python functions as tools.

    @function_tool
    def weather(city: str, days: int = 1) -> str:
        ...

The docstring says what the function does, and describes each parameter under ``Args:``. A file of such functions is
named by ``rollout.multi_turn.function_tool_path``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

from verl.base.import_utils import load_module
from verl.base.types import JsonObject
from verl.errors import ConfigError
from verl.supervision.killable_pool import Budget, KillablePool
from verl.tools.base_tool import BaseTool, ToolTimeoutError
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.threads import in_thread

F = TypeVar("F", bound=Callable[..., object])
_MARK = "__verl_tool__"
"""Attribute of functions that are tools; it survives ``functools.wraps``, unlike a set of known functions."""
SPARE_S = 30.0
"""Seconds beside a call's own that the start of its process may take on a busy machine."""


@overload
def function_tool(function: F, /) -> F: ...


@overload
def function_tool(
    name: str | None = None,
    /,
    *,
    schema: OpenAIFunctionToolSchema | JsonObject | None = None,
    isolated: bool = False,
    timeout_s: float = 60.0,
    memory_mb: int = 1024,
) -> Callable[[F], F]: ...


@overload
def function_tool(
    *,
    name: str,
    schema: OpenAIFunctionToolSchema | JsonObject | None = None,
    isolated: bool = False,
    timeout_s: float = 60.0,
    memory_mb: int = 1024,
) -> Callable[[F], F]: ...


def function_tool(
    function: Callable[..., object] | str | None = None,
    /,
    *,
    name: str | None = None,
    schema: OpenAIFunctionToolSchema | JsonObject | None = None,
    isolated: bool = False,
    timeout_s: float = 60.0,
    memory_mb: int = 1024,
) -> Callable[..., object]:
    """Mark a function as a tool; it stays a function that other code can call.

    Args:
        function: ``def`` or ``async def``, with annotated parameters and a docstring that describes each of them; a
            text is the ``name``.
        name: name of the tool, by default that of the function.
        schema: description of the tool, in place of annotations and docstring.
        isolated: whether calls run in worker processes; see :class:`IsolatedFunctionTool`.
        timeout_s: seconds of a call in such a process.
        memory_mb: memory of a call in such a process.
    """
    if isinstance(function, str):
        return function_tool(name=function, schema=schema, isolated=isolated, timeout_s=timeout_s, memory_mb=memory_mb)

    def mark(marked: Callable[..., object]) -> Callable[..., object]:
        called = name or marked.__name__
        make = partial(IsolatedFunctionTool, timeout_s=timeout_s, memory_mb=memory_mb) if isolated else FunctionTool
        setattr(marked, _MARK, partial(make, name=called, schema=schema))
        return marked

    return mark if function is None else mark(function)


def is_tool(function: Callable[..., object]) -> bool:
    """Return whether a function is marked as a tool."""
    return hasattr(function, _MARK)


class FunctionTool(BaseTool):
    """A function as a tool. It has no state; :func:`normalize_function_tool_return` says what becomes of its values.

    A function that is not ``async`` runs in a thread.

    Raises:
        ConfigError: a parameter has no type or no description.
    """

    def __init__(
        self,
        function: Callable[..., object],
        name: str | None = None,
        schema: OpenAIFunctionToolSchema | JsonObject | None = None,
    ) -> None:
        self.function = function
        described = schema_of_function(function, name) if schema is None else schema
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(described))

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: object
    ) -> tuple[ToolResponse, float | None, JsonObject | None]:
        """Call the function."""
        return normalize_function_tool_return(await self.call(parameters))

    async def call(self, parameters: JsonObject) -> object:
        """Return what the function returns."""
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**parameters)
        return await in_thread(self.function, **parameters)


def normalize_function_tool_return(result: object) -> tuple[ToolResponse, float, JsonObject]:
    """Turn what a function returned into the result of :meth:`BaseTool.execute`.

    A tuple is the answer, its reward and metrics, of which the last ones may be missing or None. An answer is a text or
    a :class:`ToolResponse`; any other value is written as JSON, or as ``str`` does if JSON cannot express it.

    Raises:
        TypeError: a tuple has another length.
    """
    parts: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"a tool returned {len(parts)} values; a tuple has length 1, 2, or 3: answer, reward, metrics.")
    answer, reward, metrics = (*parts, None, None)[:3]
    if not isinstance(answer, ToolResponse):
        if not isinstance(answer, str):
            try:
                answer = json.dumps(answer, ensure_ascii=False)
            except TypeError:
                answer = str(answer)
        answer = ToolResponse(text=answer)
    return answer, 0.0 if reward is None else float(reward), {} if metrics is None else metrics


class ToolProcessError(RuntimeError):
    """A call of an isolated function failed, or ended its process."""


class IsolatedFunctionTool(FunctionTool):
    """A function that runs in worker processes, one for each core.

    A call that takes longer than ``timeout_s`` or more memory than ``memory_mb`` is killed with all processes that it
    has started. One that ends its process is made once more in a new one if the process had served other calls.
    What the function returns travels between processes: texts, numbers, None, and lists and dicts of them.
    """

    def __init__(
        self,
        function: Callable[..., object],
        name: str | None,
        timeout_s: float,
        memory_mb: int,
        schema: OpenAIFunctionToolSchema | JsonObject | None = None,
    ) -> None:
        super().__init__(function, name, schema)
        workers = os.cpu_count() or 1
        self.config = {"max_concurrent": workers, "timeout_s": timeout_s + SPARE_S}
        self._pool = KillablePool(function, workers, Budget(timeout_s=timeout_s, memory_mb=memory_mb, kill_retries=0))

    async def call(self, parameters: JsonObject) -> object:
        """Return what the function returns.

        Raises:
            ToolTimeoutError: it took too long.
            ToolProcessError: it raised, needed too much memory, or ended its process.
        """
        [result] = await asyncio.wrap_future(self._pool.submit([parameters]))
        if result.status == "timeout":
            raise ToolTimeoutError(result.message)
        if result.status != "ok":
            shown = result.message.strip().splitlines()[-1] if result.status == "error" else result.message
            raise ToolProcessError(shown)
        return result.value

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()


def schema_of_function(function: Callable[..., object], name: str | None = None) -> OpenAIFunctionToolSchema:
    """Make the description of a tool from the annotations and the docstring of a function.

    Raises:
        ConfigError: the annotations or the docstring lack something.
    """
    from verl.utils.transformers_private import UNDESCRIBED, get_json_schema  # needs torch

    where = f"the tool {getattr(function, '__qualname__', function)} of {inspect.getsourcefile(function)}"
    variable = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
    ]
    if variable:
        raise ConfigError(f"{where}: a model cannot give {', '.join(variable)}. Name every parameter of the function.")
    try:
        schema = get_json_schema(function)
    except (*UNDESCRIBED, TypeError, NameError) as error:
        raise ConfigError(
            f"{where} has no complete description: {error}. Annotate every parameter, and describe each under 'Args:' "
            "of the docstring."
        ) from error
    described = schema["function"]
    for parameter in described["parameters"]["properties"].values():
        # JSON schema has no "nullable"; it has the type "null".
        if parameter.pop("nullable", False) and "type" in parameter:
            kinds = parameter["type"] if isinstance(parameter["type"], list) else [parameter["type"]]
            parameter["type"] = [*kinds, "null"]
    # So a parameter that the model invents is an error that it is told.
    parameters = {**described["parameters"], "additionalProperties": False}
    return OpenAIFunctionToolSchema.model_validate(
        {
            "type": "function",
            "function": {
                "name": name or described["name"],
                "description": described["description"],
                "parameters": parameters,
            },
        }
    )


def load_function_tools(path: str) -> list[FunctionTool]:
    """Make tools of the marked functions of a file, in the order in which they stand there.

    Raises:
        ConfigError: the file cannot be imported, has no marked function, or one of them is not described.
    """
    setting = "function_tool_path"
    module = load_module(path, setting)
    marked = [value for value in vars(module).values() if inspect.isfunction(value) and is_tool(value)]
    if not marked:
        raise ConfigError(
            f"{setting}={path}: no function of {Path(path).name} is marked. Write @function_tool "
            "(from verl.tools.function_tool import function_tool) above each tool."
        )
    return [getattr(function, _MARK)(function) for function in dict.fromkeys(marked)]
