"""Calls of tools that raise, hang, flood, exit and lie, in real threads: each costs itself only."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from typing import Any

import pytest

from verl.agents.loop import TrajectoryError
from verl.agents.parsers import FunctionCall, MalformedCall
from verl.agents.tool_calls import CallFailure, ToolCallResult, ToolLimits, ToolRunner, as_described
from verl.errors import ConfigError
from verl.testing.models import tiny_tokenizer
from verl.tools.base_tool import BaseTool, schema
from verl.tools.schemas import ToolResponse
from verl.tools.threads import in_thread
from verl.utils.control_tokens import ControlTokens

shorten = ControlTokens(tiny_tokenizer("char"), "").shorten
"""A token is a character."""


def fail(error: BaseException) -> None:
    raise error


DEEDS = {
    "raise": lambda: fail(KeyError("no such key")),
    "exit": lambda: sys.exit(3),
    "tell a key": lambda: fail(OSError("no answer of https://me:hunter22@host/x?api_key=abcdefgh12345678")),
    "hang": lambda: asyncio.sleep(100),
    "block": lambda: time.sleep(1.5),
    "cancel": lambda: fail(asyncio.CancelledError()),
    "own timeout": lambda: fail(TimeoutError("the service is slow")),
    "bytes": lambda: (ToolResponse.model_construct(text=b"abc"), 0.0, {}),
    "nan": lambda: (ToolResponse(text="x"), float("nan"), {}),
    "nothing": lambda: None,
    "flood": lambda: (ToolResponse(text="a" * 50_000_000 + "z" * 50_000_000), 0.0, {}),
    "surrogate": lambda: (ToolResponse.model_construct(text="a\ud800b"), None, None),
    "text": lambda: ("as older releases do", 0.25, {"n": 1}),
}


class Counting(BaseTool):
    """Counts in the trajectory's state, and misbehaves as its argument says."""

    def __init__(self, config: dict[str, Any] | None = None, name: str = "count") -> None:
        kinds = {"do": {"type": "string"}, "by": {"type": "integer", "minimum": 1}}
        super().__init__(config or {}, schema(name, "Count.", ["by"], **kinds))
        self.states: dict[str, int] = {}
        self.released: list[str] = []
        self.created_with: list[dict[str, Any]] = []
        self.threads: set[int] = set()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.created_with.append(kwargs["create_kwargs"])
        await asyncio.sleep(0.01)  # calls of one turn meet here
        instance_id, response = await super().create(instance_id)
        self.states[instance_id] = kwargs["create_kwargs"].get("first", 0)
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
        self.threads.add(threading.get_ident())
        self.states[instance_id] += parameters["by"]
        if what := parameters.get("do"):
            made = DEEDS[what]()
            return await made if asyncio.iscoroutine(made) else made
        return ToolResponse(text=str(self.states[instance_id])), 0.5, {"context": kwargs.get("agent_data")}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.states[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.states[instance_id]
        self.released.append(instance_id)


def call(name: str = "count", arguments: str = '{"by": 1}') -> FunctionCall:
    return FunctionCall(name=name, arguments=arguments)


def doing(what: str) -> FunctionCall:
    return call(arguments=f'{{"by": 1, "do": "{what}"}}')


def run(runner: ToolRunner, *turns: list[FunctionCall], **row: Any) -> tuple[list[ToolCallResult], dict[str, Any]]:
    """One trajectory."""

    async def trajectory():
        async with runner.session(row) as session:
            make = functools.partial(session.call, agent_data="here")
            found = [result for turn in turns for result in await session.call_all(turn, make)]
            return found, await session.rewards()

    return asyncio.run(trajectory())


def test_the_state_of_a_trajectory():
    tool = Counting()
    runner = ToolRunner([tool], shorten, ToolLimits(max_parallel_calls=2))
    found, rewards = run(runner, [call(), call()], [call(arguments='{"by": 5}')], count={"create_kwargs": {"first": 7}})
    # Two calls of one turn share one state: 7 + 1 + 1, then 5 more.
    assert [one.response.text for one in found] == ["8", "9", "14"]
    assert [one.reward for one in found] == [0.5] * 3
    assert found[0].metrics == {"context": "here"}
    assert tool.created_with == [{"first": 7}]
    assert rewards == {"count": 14.0}
    assert (tool.states, len(tool.released)) == ({}, 1)
    assert threading.get_ident() not in tool.threads
    # A trajectory that calls nothing creates nothing, and has no thread.
    before = threading.active_count()
    assert run(runner) == ([], {})
    assert len(tool.created_with) == 1
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("bad", "failure", "message"),
    [
        (
            call("cuont"),
            CallFailure.UNKNOWN_TOOL,
            "there is no tool 'cuont'. Did you mean 'count'? The tools are: count",
        ),
        (call(arguments="{"), CallFailure.WRONG_ARGUMENTS, "the arguments of count are no JSON"),
        (call(arguments="[1]"), CallFailure.WRONG_ARGUMENTS, "must be a JSON object"),
        (call(arguments='{"by": "one"}'), CallFailure.WRONG_ARGUMENTS, "by: 'one' is not of type 'integer'"),
        (call(arguments='{"by": 0}'), CallFailure.WRONG_ARGUMENTS, "by: 0 is less than the minimum of 1"),
        (call(arguments="{}"), CallFailure.WRONG_ARGUMENTS, "'by' is a required property"),
        (doing("raise"), CallFailure.RAISED, "the tool count failed: KeyError: 'no such key'"),
        (doing("exit"), CallFailure.RAISED, "the tool count failed: RuntimeError: sys.exit(3)"),
        (doing("tell a key"), CallFailure.RAISED, "OSError: no answer of https://***@host/x?api_key=***"),
        (doing("cancel"), CallFailure.RAISED, "the tool count failed: CancelledError"),
        (doing("own timeout"), CallFailure.RAISED, "TimeoutError: the service is slow"),
        (doing("hang"), CallFailure.TIMEOUT, "the tool count took longer than 1 s."),
        (doing("block"), CallFailure.TIMEOUT, "the tool count took longer than 1 s."),
        (doing("bytes"), CallFailure.WRONG_RESULT, "gave no answer that can be read"),
        (doing("nan"), CallFailure.WRONG_RESULT, "the reward nan, which is no number"),
        (doing("nothing"), CallFailure.WRONG_RESULT, "gave no answer that can be read (NoneType"),
    ],
)
def test_a_bad_call_is_an_error_for_the_model_and_the_next_one_works(bad: FunctionCall, failure: str, message: str):
    tool = Counting({"timeout_s": 1.0})
    runner = ToolRunner([tool], shorten, ToolLimits(max_response_tokens=300, timeout_s=100))
    found, rewards = run(runner, [bad], [call()])
    assert (found[0].failure, found[0].reward) == (failure, None)
    assert found[0].response.text.startswith("Error: ")
    assert message in found[0].response.text
    assert found[1].failure is None
    # The state is still that of this trajectory: the bad call has counted before it went wrong.
    reached = failure not in (CallFailure.UNKNOWN_TOOL, CallFailure.WRONG_ARGUMENTS)
    assert (found[1].response.text, rewards) == (("2", {"count": 2.0}) if reached else ("1", {"count": 1.0}))
    assert tool.states == {}


def test_texts_are_cut_on_the_chosen_side():
    for side, kept in (("left", "aaaaaa"), ("middle", "aaazzz"), ("right", "zzzzzz")):
        runner = ToolRunner([Counting()], shorten, ToolLimits(max_response_tokens=6, truncate_side=side))
        found, _ = run(runner, [doing("flood")], [call()])
        assert (found[0].response.text, found[0].is_truncated) == (kept, True)
        assert (found[1].response.text, found[1].is_truncated) == ("2", False)
    runner = ToolRunner([Counting()], shorten)
    found, _ = run(runner, [doing("surrogate")], [doing("text")])
    assert (found[0].response.text, found[0].reward, found[0].metrics) == ("a?b", None, {})
    assert (found[1].response.text, found[1].reward, found[1].metrics) == ("as older releases do", 0.25, {"n": 1})


def test_calls_beyond_the_limit_and_text_that_is_no_call():
    runner = ToolRunner([Counting()], shorten, ToolLimits(max_parallel_calls=2))
    found, rewards = run(runner, [call(), call(), call()])
    assert [one.failure for one in found] == [None, None, CallFailure.TOO_MANY]
    assert found[2].response.text == "Error: a turn may have at most 2 calls; this one was not made."
    assert rewards == {"count": 2.0}

    async def refused():
        async with runner.session() as session:
            return session.refuse(MalformedCall("<tool_call>{", "invalid JSON"))

    result = asyncio.run(refused())
    assert (result.failure, result.arguments) == (CallFailure.MALFORMED, "<tool_call>{")
    assert result.response.text == "Error: this is no tool call: invalid JSON"


def test_a_tool_has_so_many_calls_at_once_over_all_trajectories():
    now, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.03)
        with lock:
            now -= 1

    class Slow(Counting):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
            await in_thread(work)
            return ToolResponse(text="done"), 0.0, {}

    runner = ToolRunner([Slow({"max_concurrent": 3})], shorten, ToolLimits(max_parallel_calls=2))
    calls = [call(), call()]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.extend(run(runner, calls)[0])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 3
    assert [one.response.text for one in results] == ["done"] * 12
    assert max(one.waited_s for one in results) > 0


def test_a_cancelled_trajectory_releases_what_it_has():
    tool = Counting()
    runner = ToolRunner([tool], shorten)

    async def trajectory() -> None:
        async with runner.session() as session:
            await session.call(call())
            await session.call(doing("hang"))

    async def cancelled() -> None:
        task = asyncio.create_task(trajectory())
        while not any(tool.states.values()) or next(iter(tool.states.values())) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert (tool.states, len(tool.released)) == ({}, 1)


def ended(runner: ToolRunner, *turns: list[FunctionCall]) -> str:
    """Why the trajectory ended with ``tool_error``."""
    with pytest.raises(TrajectoryError) as error:
        run(runner, *turns)
    assert error.value.status == "tool_error"
    return str(error.value)


def test_a_tool_that_cannot_be_created_or_gives_no_reward_ends_the_trajectory():
    class Broken(Counting):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
            self.created_with.append({})
            await DEEDS[self.config["create"]]()
            return await super().create(instance_id, **kwargs)

    for what, why in (
        ("raise", "KeyError: 'no such key'"),
        ("hang", "took longer than 0.2 s"),
        ("block", "took longer"),
    ):
        tool = Broken({"create": what, "timeout_s": 0.2})
        message = ended(ToolRunner([tool], shorten, ToolLimits(max_parallel_calls=2)), [call(), call()])
        assert message.startswith("create: the tool count ")
        assert why in message
        assert len(tool.created_with) == 1

    class Unrewarding(Counting):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            given = DEEDS[self.config["reward"]]()
            return await given if asyncio.iscoroutine(given) else given

    for what, why in (("raise", "KeyError: 'no such key'"), ("hang", "took longer than 0.2 s"), ("text", "no number")):
        tool = Unrewarding({"reward": what, "timeout_s": 0.2})
        message = ended(ToolRunner([tool], shorten), [call()])
        assert message.startswith("calc_reward: ")
        assert why in message
        assert (tool.states, len(tool.released)) == ({}, 1)


def test_arguments_take_the_type_of_their_description():
    text, number, whole = {"type": "string"}, {"type": "number"}, {"type": "integer"}
    for value, described, expected in [
        (42, text, "42"), (1.5, text, "1.5"), (True, text, "true"), ([1], text, [1]), (None, text, None),
        ("42", whole, 42), ("4.5", whole, "4.5"), ("4", number, 4), ("4.5", number, 4.5), ("true", whole, "true"),
        ("true", {"type": "boolean"}, True), ("1", {"type": "boolean"}, "1"), ("x", number, "x"),
        ("[1, 2]", {"type": "array"}, [1, 2]), ('{"a": 1}', {"type": "object"}, {"a": 1}), ("[1]", text, "[1]"),
        (4, {"type": ["string", "integer"]}, 4), ("4", {"type": ["string", "integer"]}, "4"),
        (4, {"anyOf": [text, {"type": "null"}]}, "4"), ("4", {"anyOf": [whole, {"type": "null"}]}, 4),
        ("null", {"type": ["integer", "null"]}, "null"), (4, {}, 4), ("4", {}, "4"), ("9" * 5000, whole, "9" * 5000),
    ]:  # fmt: skip
        found = as_described(value, described)
        assert (found, type(found)) == (expected, type(expected))
    found, _ = run(ToolRunner([Counting()], shorten), [call(arguments='{"by": "3"}')])
    assert found[0].response.text == "3"


class Quick(Counting):
    """Runs in the event loop of all trajectories, as it promises."""

    never_blocks = True


class Inherits(Quick):
    """Makes no promise itself."""


def test_a_tool_that_never_blocks_needs_no_thread():
    quick, inherits = Quick({"timeout_s": 0.2}), Inherits()
    calls = [call(), doing("hang"), doing("exit"), doing("raise"), call()]
    found = [run(ToolRunner([tool], shorten), [one]) for tool in (quick, inherits) for one in calls[:1]]
    assert [results[0].response.text for results, _ in found] == ["1", "1"]
    assert quick.threads == {threading.get_ident()}
    assert threading.get_ident() not in inherits.threads
    results = [result for one in calls for result in run(ToolRunner([quick], shorten), [one])[0]]
    assert [result.failure for result in results] == [None, CallFailure.TIMEOUT, *[CallFailure.RAISED] * 2, None]


def test_rows_that_say_tools_kwargs_otherwise_are_refused_or_told_once(caplog):
    runner = ToolRunner([Counting()], shorten)
    for wrong in ("count", ["count"], {"count": "first"}, {"count": {"create_kwargs": [7]}}):
        with pytest.raises(ConfigError, match=r"tools_kwargs.*it is an object that has for each tool by name"):
            asyncio.run(runner.session(wrong).__aenter__())  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        run(runner, [call()], count={"create_kwarg": {"first": 7}}, counts={"create_kwargs": None}, other=None)
    assert [record.getMessage() for record in caplog.records] == [
        "tools_kwargs have 'create_kwarg', which is not read. Did you mean 'create_kwargs'?",
        "tools_kwargs name 'counts', which is no tool of this run. Did you mean 'count'?",
    ]


@pytest.mark.parametrize("config", [{"max_concurrent": "many"}, {"max_concurrent": 0}, {"timeout_s": -3}])
def test_limits_of_a_tool_are_checked_at_the_start(config):
    with pytest.raises(ConfigError, match=r"the tool count: config\.\w+=.* must be a"):
        ToolRunner([Counting(config)], shorten)


def test_trajectories_leave_no_threads_and_no_files():
    runner = ToolRunner([Counting({"timeout_s": 0.05})], shorten)

    def settled() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = settled()
    for index in range(30):
        run(runner, [doing("hang") if index % 10 == 0 else call()], [doing("raise")])
        assert settled()[0] <= before[0] + 5  # they are used again
    runner.close()
    deadline = time.monotonic() + 20
    while settled() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert settled() <= before
