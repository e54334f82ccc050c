"""The adapter of verifiers, with environments that its own classes make; `make test-verifiers` installs the package."""

from __future__ import annotations

import asyncio
import sys
import types
from typing import Any

import pytest

from verl.errors import ConfigError
from verl.plugins.verifiers.environment import VerifiersEnvironment

vf = pytest.importorskip("verifiers", reason="verifiers is not installed; `make test-verifiers` has it")
datasets = pytest.importorskip("datasets")


def load_environment(kind: str = "turns") -> Any:
    """As a package of an environment has it."""
    rows = datasets.Dataset.from_list([{"question": "Say 2.", "answer": "2"}, {"question": "Say 3.", "answer": "3"}])

    def exact(completion: Any, answer: str) -> float:
        said = [message["content"] for message in completion if message["role"] == "assistant"]
        return float(said[-1] == answer) if said else 0.0

    class Nagging(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            if kind == "raises":
                raise ZeroDivisionError("no more")
            return [{"role": "user", "content": f"Again, {len(state['trajectory'])}."}]

    def double(number: int) -> int:
        """Double a number.

        Args:
            number: the number.
        """
        return 2 * number

    rubric = vf.Rubric(funcs=[exact])
    if kind == "tools":
        return vf.ToolEnv(tools=[double], dataset=rows, rubric=rubric, max_turns=5)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=rows, rubric=rubric, system_prompt="Be short.")
    return Nagging(dataset=rows, rubric=rubric, max_turns=3)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("saying")
    module.load_environment = load_environment  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "saying", module)


def play(kind: str, *actions: Any, **row: Any) -> tuple[Any, list[Any], float | None, Any]:
    """First messages, answers of the steps, the score at the end."""

    async def episode() -> tuple[Any, list[Any], float | None, Any]:
        config = {"env_id": "saying", "env_args": {"kind": kind}}
        VerifiersEnvironment.check(config)
        environment = VerifiersEnvironment(config)
        prompt = [{"role": "user", "content": "Say 5."}]
        first = await environment.reset(seed=1, messages=prompt, **row)
        try:
            found = [await environment.step(*action) for action in actions]
            return first, found, await environment.score(), environment.tools
        finally:
            await environment.close()
            await environment.close()

    return asyncio.run(episode())


def test_several_turns_are_scored_by_the_rubric():
    first, found, rest, _ = play("turns", ("1",), ("2",), ("2",), example=0)
    assert first == [{"role": "user", "content": "Say 2."}]
    assert [answer[:4] for answer in found] == [
        ([{"role": "user", "content": "Again, 1."}], None, False, False),
        ([{"role": "user", "content": "Again, 2."}], None, False, False),
        ([], 1.0, True, False),
    ]
    assert (found[-1][4]["exact"], found[-1][4]["num_turns"], rest) == (1.0, 3.0, None)


def test_an_episode_that_the_loop_ends_is_scored_too():
    assert play("turns", ("3",), example=1)[2] == 1.0
    assert play("turns", ("4",), example=1)[2] == 0.0
    assert play("turns", ("5",), answer="5")[2] == 1.0  # the row's own prompt and answer


def test_one_turn_with_a_system_prompt():
    first, found, rest, _ = play("single", ("3",), example=1)
    assert first == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say 3."}]
    assert (found[0][:4], rest) == (([], 1.0, True, False), None)


def test_tools():
    call = {"id": "call00000", "type": "function", "function": {"name": "double", "arguments": '{"number": 1}'}}
    _, found, _, tools = play("tools", ("", [call]), ("2", []), example=0)
    assert [tool["function"]["name"] for tool in tools] == ["double"]
    assert tools[0]["function"]["parameters"]["required"] == ["number"]
    assert found[0][:4] == (
        [{"role": "tool", "tool_call_id": "call00000", "content": "2"}],
        None,
        False,
        False,
    )
    assert found[1][:4] == ([], 1.0, True, False)


def test_what_goes_wrong():
    with pytest.raises((RuntimeError, ZeroDivisionError), match="no more"):
        play("raises", ("1",), example=0)
    with pytest.raises(ValueError, match="the environment has the examples 0 to 1"):
        play("turns", example=7)
    for config, problem in (({}, "env_id=None"), ({"env_id": "saying", "args": {}}, "unknown: args")):
        with pytest.raises(ConfigError, match=problem):
            VerifiersEnvironment.check(config)
