"""Call tools so that a bad call costs its own trajectory nothing but an error message to the model.

runner = ToolRunner(tools, template.control.shorten, ToolLimits(timeout_s=30))     # one per process
async with runner.session(tools_kwargs) as session:                                # one per trajectory
    results = await session.call_all(turn.calls)                                   # one per turn
    rewards = await session.rewards()
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Real
from typing import Any, Literal, TypeVar

from jsonschema import Draft202012Validator

from verl.agents.images import media_parts
from verl.agents.loop import TrajectoryError
from verl.agents.parsers import FunctionCall, MalformedCall
from verl.agents.parsers.base import properties_of
from verl.agents.slots import Slots, no_limit, slots_of_run
from verl.base.redact import redacted
from verl.base.registry import suggest
from verl.base.types import JsonMapping, JsonObject
from verl.datasets.chat import Message
from verl.errors import ConfigError, DataError
from verl.tools.base_tool import BaseTool, ToolTimeoutError
from verl.tools.schemas import ToolResponse
from verl.tools.threads import LoopThread, LoopThreads, called
from verl.vision.prompts import ImagePrompts

logger = logging.getLogger(__name__)
T = TypeVar("T")

Side = Literal["left", "middle", "right"]
UNBLOCK_S = 0.5
"""Seconds after a timeout in which the thread of a trajectory's tools has to respond, or it is given up."""
ROW_KEYS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
FORM_OF_ROWS = f"it is an object that has for each tool by name an object of {', '.join(ROW_KEYS)}, each an object too."
MAX_DETAIL = 500
"""Characters of an error message that a model is shown."""


class CallFailure(StrEnum):
    """Why a call gave no result; the values are names of metrics."""

    MALFORMED = "malformed_call"
    """The text was no call in the model's format."""
    UNKNOWN_TOOL = "unknown_tool"
    """There is no tool of this name."""
    WRONG_ARGUMENTS = "wrong_arguments"
    """The arguments do not fit the description of the tool."""
    TOO_MANY = "too_many_calls"
    """The turn had more calls than ``max_parallel_calls``; this one was not made."""
    TIMEOUT = "tool_timeout"
    """The call took longer than the tool may."""
    RAISED = "tool_error"
    """The tool raised an exception."""
    WRONG_RESULT = "wrong_tool_result"
    """The tool returned something else than a response, a reward and metrics."""


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """Limits of all calls; a tool's own ``config`` may set ``timeout_s`` and ``max_concurrent`` for itself."""

    timeout_s: float = 60.0
    """Seconds of one call, without its wait for a slot."""
    max_parallel_calls: int = 1
    """Calls of one turn that are made; each further one is answered with an error."""
    max_response_tokens: int = 256
    """Tokens of the text of one response."""
    truncate_side: Side = "middle"
    """Part of a longer text that stays: its beginning (``left``), its end (``right``), or both (``middle``)."""
    malformed_penalty: float = 0.0
    """Deduction from the score for a call that cannot be read; its reward is the negative, or None for 0."""


@dataclass(frozen=True, kw_only=True)
class ToolCallResult:
    """Result of one call: an answer, or the failure."""

    name: str
    arguments: str
    """As the model wrote them."""
    response: ToolResponse
    """For the model; of a failed call, the error message."""
    reward: float | None = None
    metrics: JsonObject = field(default_factory=dict)
    failure: CallFailure | None = None
    seconds: float = 0.0
    """Time in the tool."""
    waited_s: float = 0.0
    """Time until a slot was free."""
    began: float = field(default_factory=time.time)
    """Time at which the call was made, before it waited for a slot, in seconds since 1970."""
    is_truncated: bool = False
    shown: Sequence[Message] = ()
    """Parts of the answer's message with the images and then the videos of the response, as inputs of the policy."""


class _CallError(Exception):
    """A call that failed; the message is for the model."""

    def __init__(self, failure: CallFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class ToolRunner:
    """The tools of a process, with their limits. Threads may share it.

    Args:
        tools: the tools.
        shorten: cuts a text to a number of tokens: ``shorten(text, max_tokens, side)``. It must cope with any length.
        limits: limits of all calls.
    """

    def __init__(
        self,
        tools: Sequence[BaseTool],
        shorten: Callable[[str, int, Side], str],
        limits: ToolLimits | None = None,
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.limits = limits or ToolLimits()
        self._shorten = shorten
        self.schemas = descriptions(tools)
        """The descriptions, for the chat template and the parser."""
        self._validators = {
            tool.name: Draft202012Validator(described["function"].get("parameters", {}))
            for tool, described in zip(tools, self.schemas, strict=True)
        }
        self._properties = properties_of(self.schemas)
        self._slots: dict[str, Slots] = {
            tool.name: slots_of_run(tool.name, limit) if (limit := _most_concurrent(tool)) else no_limit
            for tool in tools
        }
        self.threads = LoopThreads()
        """Lend the threads of trajectories."""
        self._logged: set[tuple[str, str]] = set()
        self._telling = threading.Lock()

    @asynccontextmanager
    async def session(
        self, tools_kwargs: JsonMapping | None = None, images: ImagePrompts | None = None
    ) -> AsyncIterator[ToolSession]:
        """The tools for one trajectory; at the end all that they have created is released.

        Args:
            tools_kwargs: of each tool by name, the row's ``create_kwargs``, ``execute_kwargs``, ``calc_reward_kwargs``
                and ``release_kwargs``.
            images: reads images and videos of results, by the policy's processor; None for a model for text.

        Raises:
            ConfigError: they have another form.
        """
        self._check_row(tools_kwargs)
        session = ToolSession(self, {} if tools_kwargs is None else tools_kwargs, images)
        try:
            yield session
        finally:
            await session.close()

    def _check_row(self, tools_kwargs: object) -> None:
        """Refuse a row's arguments of a wrong form, and warn once of those that nothing reads."""
        if not isinstance(tools_kwargs, Mapping | None):
            raise ConfigError(f"tools_kwargs is {tools_kwargs!r:.100}; {FORM_OF_ROWS}")
        for name, arguments in (tools_kwargs or {}).items():
            if arguments is None:
                continue
            if not isinstance(arguments, Mapping) or not all(
                isinstance(value, Mapping | None) for value in arguments.values()
            ):
                raise ConfigError(f"tools_kwargs['{name}'] is {arguments!r:.100}; {FORM_OF_ROWS}")
            if name not in self.tools:
                names = sorted(self.tools)
                self._warn("tools_kwargs name '%s', which is no tool of this run.%s", name, suggest(name, names))
            for key in set(arguments) - set(ROW_KEYS):
                self._warn("tools_kwargs have '%s', which is not read.%s", key, suggest(key, ROW_KEYS))

    def _warn(self, message: str, name: str, suggestion: str) -> None:
        with self._telling:
            is_repeated = (message, name) in self._logged
            self._logged.add((message, name))
        if not is_repeated:
            logger.warning(message, name, suggestion)

    def close(self) -> None:
        """End what the tools hold in this process."""
        for tool in self.tools.values():
            try:
                tool.close()
            except Exception as error:  # noqa: BLE001 - users' code raises anything, and the run is over
                self.log_once(tool.name, error)
        self.threads.close()

    def read_arguments(self, call: FunctionCall) -> JsonObject:
        """Arguments of a call that fit the description of its tool.

        Raises:
            _CallError: there is no such tool, or they do not fit.
        """
        if call.name not in self.tools:
            names = sorted(self.tools)
            listed = f"The tools are: {', '.join(names)}." if names else "There are no tools."
            raise _CallError(
                CallFailure.UNKNOWN_TOOL, f"there is no tool {call.name!r:.100}.{suggest(call.name, names)} {listed}"
            )
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError) as error:
            raise _CallError(
                CallFailure.WRONG_ARGUMENTS, f"the arguments of {call.name} are no JSON: {error}"
            ) from error
        if not isinstance(arguments, dict):
            raise _CallError(CallFailure.WRONG_ARGUMENTS, f"the arguments of {call.name} must be a JSON object.")
        described = self._properties[call.name]
        arguments = {name: as_described(value, described.get(name, {})) for name, value in arguments.items()}
        problems = sorted(self._validators[call.name].iter_errors(arguments), key=lambda error: error.json_path)
        if problems:
            listed = "; ".join(f"{error.json_path.removeprefix('$.')}: {error.message[:200]}" for error in problems[:3])
            raise _CallError(CallFailure.WRONG_ARGUMENTS, f"the arguments of {call.name} are wrong: {listed}")
        return arguments

    def shortened(self, text: str) -> tuple[str, bool]:
        """The text within ``max_response_tokens``, and whether it was cut."""
        usable = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        short = self._shorten(usable, self.limits.max_response_tokens, self.limits.truncate_side)
        return short, short != usable

    def log_once(self, tool: str, error: BaseException) -> None:
        """Log the traceback of a tool's error, once for each kind of error of a tool."""
        with self._telling:
            is_repeated = (tool, type(error).__name__) in self._logged
            self._logged.add((tool, type(error).__name__))
        if not is_repeated:
            text = redacted("".join(traceback.format_exception(error)))
            logger.warning("the tool %s failed; later errors of this kind are only counted:\n%s", tool, text)


class ToolSession:
    """The tools of one trajectory. Their code runs in a thread lent to it alone, so that it may block."""

    def __init__(self, runner: ToolRunner, tools_kwargs: JsonMapping, images: ImagePrompts | None = None) -> None:
        self.runner = runner
        self._images = images
        self.tools_kwargs = tools_kwargs
        """See :meth:`ToolRunner.session`."""
        self._thread: LoopThread | None = None
        self._instances: dict[str, asyncio.Task[tuple[str, ToolResponse]]] = {}
        self._results: dict[int, ToolCallResult] = {}
        """Results of calls that :meth:`result` has not returned yet, by the identity of the call."""

    async def call_all(
        self, calls: Sequence[FunctionCall], call: Callable[[FunctionCall], Awaitable[ToolCallResult]] | None = None
    ) -> list[ToolCallResult]:
        """Make the calls of one turn at once, at most ``max_parallel_calls`` of them.

        Args:
            calls: the calls.
            call: makes one of them, by default :meth:`call`.

        Returns:
            One result for each call, in their order.

        Raises:
            TrajectoryError: the ``create`` of a tool failed.
        """
        most = self.runner.limits.max_parallel_calls
        results = await asyncio.gather(*map(call or self.call, calls[:most]))
        problem = f"a turn may have at most {most} {'call' if most == 1 else 'calls'}; this one was not made."
        return [*results, *(self._failed(left, CallFailure.TOO_MANY, problem) for left in calls[most:])]

    def refuse(self, malformed: MalformedCall) -> ToolCallResult:
        """The result of what a parser could not read."""
        call = FunctionCall(name="", arguments=malformed.text)
        failed = self._failed(call, CallFailure.MALFORMED, f"this is no tool call: {malformed.reason}")
        return replace(failed, reward=-self.runner.limits.malformed_penalty or None)

    async def call(self, call: FunctionCall, **kwargs: object) -> ToolCallResult:
        """Make one call.

        Args:
            call: the call.
            **kwargs: for ``execute`` of the tool, such as ``agent_data``.
        """
        result = self._results[id(call)] = await self._answered(call, kwargs)
        return result

    async def result(self, call: FunctionCall, answer: object) -> ToolCallResult:
        """Return the result of a call whose answer a method of an agent loop may have changed, or given itself.

        Args:
            call: the call.
            answer: response, reward and metrics.
        """
        recorded = self._results.pop(id(call), None)
        if recorded is not None and answer == (recorded.response, recorded.reward, recorded.metrics):
            return recorded
        result = recorded or ToolCallResult(name=call.name, arguments=call.arguments, response=ToolResponse())
        try:
            response, reward, metrics = _checked(call.name, answer)
            shown = await self._read_media(call.name, response) or result.shown
        except _CallError as error:
            return self._failed(call, error.failure, str(error))
        return self._with_answer(result, response, reward, metrics, shown)

    def _with_answer(
        self,
        result: ToolCallResult,
        response: ToolResponse,
        reward: float | None,
        metrics: JsonObject,
        shown: Sequence[Message],
    ) -> ToolCallResult:
        text, is_truncated = self.runner.shortened(response.text or "")
        response = response.model_copy(update={"text": text, "image": None, "video": None})
        return replace(
            result, response=response, reward=reward, metrics=metrics, is_truncated=is_truncated, shown=shown
        )

    async def _answered(self, call: FunctionCall, kwargs: JsonObject) -> ToolCallResult:
        made_at, begin = time.time(), time.monotonic()
        start = begin
        try:
            arguments = self.runner.read_arguments(call)
            tool = self.runner.tools[call.name]
            async with self.runner._slots[call.name]():
                start = time.monotonic()
                response, reward, metrics = await self._execute(tool, arguments, kwargs)
            shown = await self._read_media(tool.name, response)
        except _CallError as error:
            failed = self._failed(call, error.failure, str(error), time.monotonic() - start, start - begin)
            return replace(failed, began=made_at)
        result = ToolCallResult(
            name=call.name,
            arguments=call.arguments,
            response=response,
            seconds=time.monotonic() - start,
            waited_s=start - begin,
            began=made_at,
        )
        return self._with_answer(result, response, reward, metrics, shown)

    async def rewards(self) -> dict[str, float | None]:
        """``calc_reward`` of each tool that the trajectory has used.

        Raises:
            TrajectoryError: it failed, so the trajectory cannot be scored as the tool's author means it.
        """
        rewards: dict[str, float | None] = {}
        for name, instance in self._created().items():
            tool, kwargs = self.runner.tools[name], self._row_arguments(name, "calc_reward_kwargs")
            if type(tool).calc_reward is BaseTool.calc_reward:  # a way to another thread and back for nothing
                rewards[name] = 0.0
                continue
            try:
                rewards[name] = _number(await self._run(tool, tool.calc_reward, instance, **kwargs))
            except _CallError as error:
                raise TrajectoryError(f"calc_reward: {error}", "tool_error") from error
        return rewards

    async def close(self) -> None:
        """Release everything; errors are logged, for the trajectory is over."""
        for name, instance in self._created().items():
            tool, kwargs = self.runner.tools[name], self._row_arguments(name, "release_kwargs")
            if type(tool).release is BaseTool.release:
                continue
            try:
                await self._run(tool, tool.release, instance, **kwargs)
            except _CallError as error:
                logger.debug("release of the tool %s: %s", name, error)
        for making in self._instances.values():
            if making.get_loop() is asyncio.get_running_loop():
                making.cancel()  # those in the thread are cancelled with it
        self._instances.clear()
        if self._thread is not None:
            self.runner.threads.take_back(self._thread)
            self._thread = None

    async def _execute(
        self, tool: BaseTool, arguments: JsonObject, kwargs: JsonObject
    ) -> tuple[ToolResponse, float | None, JsonObject]:
        kwargs = {**self._row_arguments(tool.name, "execute_kwargs"), **kwargs}
        try:
            result = await self._run(tool, self._create_and_execute, tool, arguments, kwargs)
        except _CallError as error:
            making = self._instances.get(tool.name)
            if making is None or not making.done() or _has_failed(making):
                # Whatever the policy writes, this tool cannot answer it.
                raise TrajectoryError(f"create: {error}", "tool_error") from error
            raise
        return _checked(tool.name, result)

    async def _create_and_execute(self, tool: BaseTool, arguments: JsonObject, kwargs: JsonObject) -> object:
        """Create the trajectory's state at the first call, then execute; runs in the thread of the tools."""
        making = self._instances.get(tool.name)
        if making is None:
            kwargs_of_row = self._row_arguments(tool.name, "create_kwargs")
            making = asyncio.ensure_future(called(tool.create, create_kwargs=kwargs_of_row))
            self._instances[tool.name] = making
        # Calls of one turn share it, and one that times out must not cancel it for the others.
        instance, _ = await asyncio.shield(making)
        return await tool.execute(instance, arguments, **kwargs)

    async def _read_media(self, name: str, response: ToolResponse) -> list[Message]:
        """The parts of a message with the images and videos of a response, as inputs of the policy.

        Raises:
            _CallError: one cannot be read, or the policy reads none.
        """
        media = {"image": response.image or [], "video": response.video or []}
        if not any(media.values()):
            return []

        def read() -> list[Message]:
            return [
                part
                for kind, values in media.items()
                for index, value in enumerate(values)
                for part in media_parts(kind, value, self._images, f"the tool {name}, {kind} {index}")
            ]

        try:
            return await asyncio.to_thread(read)  # decoding would block all other conversations
        except (ConfigError, DataError) as error:
            raise _CallError(CallFailure.WRONG_RESULT, str(error)) from error

    def _created(self) -> dict[str, str]:
        """Names of the states that exist, by tool."""
        finished = [(name, making) for name, making in self._instances.items() if making.done()]
        return {name: making.result()[0] for name, making in finished if not _has_failed(making)}

    async def _run(
        self, tool: BaseTool, function: Callable[..., T | Awaitable[T]], *args: object, **kwargs: object
    ) -> T:
        """Run code of a tool for at most the tool's time: in the thread of the tools, unless it never blocks."""
        timeout_s = float(tool.config.get("timeout_s") or self.runner.limits.timeout_s)
        thread, running = None, called(function, *args, **kwargs)
        if not vars(type(tool)).get("never_blocks"):
            thread = self._thread = self._thread or self.runner.threads.lend("tools of a trajectory")
            running = asyncio.wrap_future(thread.submit(running))
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await running
        except ToolTimeoutError as error:
            raise _CallError(CallFailure.TIMEOUT, f"the tool {tool.name} {error}.") from error
        except TimeoutError as error:
            if not limit.expired():
                raise self._raised(tool, error) from error
            if thread is not None and not await thread.responds(UNBLOCK_S) and self._thread is thread:
                # The tool's code blocks its loop and cannot be interrupted. It ends when that returns.
                self.runner.threads.take_back(thread)
                self._thread = None
                self._instances = {name: making for name, making in self._instances.items() if making.done()}
            raise _CallError(CallFailure.TIMEOUT, f"the tool {tool.name} took longer than {timeout_s:g} s.") from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # not this trajectory was cancelled, but the tool's code
                raise self._raised(tool, error) from error
            raise
        except Exception as error:  # users' code raises anything
            raise self._raised(tool, error) from error

    def _raised(self, tool: BaseTool, error: BaseException) -> _CallError:
        self.runner.log_once(tool.name, error)
        message = f"the tool {tool.name} failed: {type(error).__name__}: {error}"
        return _CallError(CallFailure.RAISED, redacted(message))

    def _failed(
        self, call: FunctionCall, failure: CallFailure, message: str, seconds: float = 0.0, waited_s: float = 0.0
    ) -> ToolCallResult:
        text, is_truncated = self.runner.shortened(f"Error: {message[:MAX_DETAIL]}")
        return ToolCallResult(
            name=call.name,
            arguments=call.arguments,
            response=ToolResponse(text=text),
            failure=failure,
            seconds=seconds,
            waited_s=waited_s,
            is_truncated=is_truncated,
        )

    def _row_arguments(self, tool: str, key: str) -> JsonObject:
        return dict((self.tools_kwargs.get(tool) or {}).get(key) or {})


def _most_concurrent(tool: BaseTool) -> int | None:
    """Return how many calls of a tool may run at once; None for any number. Check its ``timeout_s`` too.

    Raises:
        ConfigError: one of the two is no positive number.
    """
    limits: dict[str, tuple[type, ...]] = {"max_concurrent": (int,), "timeout_s": (int, float)}
    for key, kinds in limits.items():
        value = tool.config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value <= 0):
            allowed = "an integer >= 1" if kinds == (int,) else "a number of seconds > 0"
            raise ConfigError(f"the tool {tool.name}: config.{key}={value!r} must be {allowed}, or left out.")
    return tool.config.get("max_concurrent")


def _has_failed(making: asyncio.Task[object]) -> bool:
    return making.done() and (making.cancelled() or making.exception() is not None)


def descriptions(tools: Sequence[BaseTool]) -> list[JsonObject]:
    """Return what a chat template tells the model of each tool."""
    described = [tool.get_openai_tool_schema() for tool in tools]
    return [schema.to_template() for schema in described if schema is not None]


def _checked(name: str, result: object) -> tuple[ToolResponse, float | None, JsonObject]:
    """The parts of what a tool's ``execute`` returned.

    Raises:
        _CallError: it is something else.
    """
    match result:
        case (str() as text, reward, dict() | None as metrics):  # the form of older releases
            return ToolResponse(text=text), _number(reward), metrics or {}
        case (ToolResponse(text=str() | None) as response, reward, dict() | None as metrics):
            return response, _number(reward), metrics or {}
    raise _CallError(
        CallFailure.WRONG_RESULT,
        f"the tool {name} gave no answer that can be read ({type(result).__name__} in the place of a response, a "
        "reward and metrics).",
    )


_KINDS = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
"""Names of JSON schema for types of Python; a text is not among them, because it is what gets converted."""


def as_described(value: object, schema: JsonMapping) -> Any:
    """Return an argument in the JSON type that its description names, where it was only written in another.

    A number or a truth value becomes the text of a parameter that takes text alone; a text that is JSON becomes the
    number, truth value, list or object of a parameter that takes no text. Anything else stays, for the check to refuse.

    >>> as_described(42, {"type": "string"}), as_described("42", {"type": "integer"})
    ('42', 42)
    """
    kinds: set[str] = set()
    for variant in (schema, *schema.get("anyOf", ())):
        named = variant.get("type") or ()
        kinds |= {named} if isinstance(named, str) else set(named)
    if isinstance(value, bool | int | float):
        return json.dumps(value) if kinds and kinds <= {"string", "null"} else value
    if not isinstance(value, str) or not kinds or "string" in kinds:
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    kind = _KINDS.get(type(read))
    return read if kind in kinds or (kind == "integer" and "number" in kinds) else value


def _number(reward: object) -> float | None:
    if reward is None:
        return None
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise _CallError(CallFailure.WRONG_RESULT, f"the tool gave the reward {reward!r:.50}, which is no number.")
    return float(reward)
