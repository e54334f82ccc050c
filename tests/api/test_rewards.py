"""Reward functions as objects: forms, weights, columns, and the file by which other processes get them."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.api.functions import with_resolved_types, write_module
from verl.api.rewards import BatchRewards, check_columns, combine, named_rewards
from verl.base.import_utils import load_object
from verl.errors import ConfigError, RewardError
from verl.workers.reward_manager.function import RewardFunction, RewardSample, RowParameters


def right(solution_str: str, answer: str) -> float:
    return float(solution_str == answer)


def short(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0 / len(text) for text in completions]


def asked_and_right(completions: list[Any], prompts: list[Any], answer: list[str]) -> list[float]:
    for prompt, completion in zip(prompts, completions, strict=True):
        assert prompt == [{"role": "user", "content": "q"}]
        assert completion[0]["role"] == "assistant"
    return [float(said[0]["content"].endswith(true)) for said, true in zip(completions, answer, strict=True)]


def row(text: str, prompt: str = "?", **columns: Any) -> dict[str, Any]:
    """What a run gives a function for one response."""
    return {"solution_str": text, "prompt": [{"role": "user", "content": prompt}], **columns}


def scored(functions: list[Any], rows: list[dict[str, Any]], weights: Any = None, text_prompts: bool = True) -> Any:
    """What the combined function returns for each response."""
    function = combine(named_rewards(functions, weights), list(rows[0]), "prompt", text_prompts)
    if isinstance(function, BatchRewards):
        lists = {name: [one[name] for one in rows] for name in rows[0]}
        return function(solution_strs=lists.pop("solution_str"), **lists)
    results = [function(**one) for one in rows]
    return [asyncio.run(result) if inspect.isawaitable(result) else result for result in results]


def test_functions_of_two_forms_are_weighed_and_added() -> None:
    bonus = 0.5
    found = scored(
        [right, short, lambda solution_str: bonus], [row("ab", answer="ab"), row("abcd", answer="b")], [2, 4, 1]
    )
    # 2·1 + 4·1/2 + 0.5 = 4.5;   2·0 + 4·1/4 + 0.5 = 1.5
    assert found == [
        {"score": 4.5, "right": 1.0, "short": 0.5, "reward_3": 0.5},
        {"score": 1.5, "right": 0.0, "short": 0.25, "reward_3": 0.5},
    ]


def test_a_failure_in_its_own_process_is_the_status_of_its_sample() -> None:
    bonus = 0.5
    reward = combine(named_rewards([lambda solution_str, answer: bonus / len(answer)], None), ["prompt", "answer"])
    function = RewardFunction(reward, {})
    samples = [RewardSample("unknown", "x", None, {}, columns={"answer": answer}) for answer in ("", "ab")]
    scores = function.score_samples(samples)
    function.close()
    assert [(score.status, score.value) for score in scores] == [("error", 0.0), ("ok", 0.25)]


def test_messages_and_none_as_in_trl() -> None:
    rows = [row("is 7", "q", answer="7"), row("is 8", "q", answer="7")]
    seen = scored([asked_and_right], rows, text_prompts=False)
    assert seen == [{"score": 1.0}, {"score": 0.0}]
    with pytest.raises(RewardError, match="no reward function judged the response: reward_1 returned None"):
        scored([lambda solution_str: None], [row("a")])


def test_a_function_of_everything_gets_everything() -> None:
    seen: dict[str, Any] = {}
    scored([lambda solution_str, **columns: float(not seen.update(columns))], [row("a", "who?", answer="b", level=3)])
    assert seen == {"prompt": "who?", "answer": "b", "level": 3}


def test_what_a_row_lacks() -> None:
    """One function needs what it requires in every row; of several, each gets None where a row is not its own."""

    def level_or_3(solution_str: str, level: int = 3) -> float:
        return float(level)

    def judged(solution_str: str, answer: str | None) -> float | None:
        return None if answer is None else 1.0

    columns = ["prompt", "answer", "level"]
    alone, level = (combine(named_rewards([function], None), columns) for function in (right, level_or_3))
    required = [RowParameters.from_function(function, "sample", {}).required for function in (alone, level)]
    assert required == [("answer",), ()]
    both = combine(named_rewards([judged, level_or_3], None), columns)
    assert RowParameters.from_function(both, "sample", {}).required == ()
    function = RewardFunction(both, {})
    sample = RewardSample("unknown", "x", None, {}, columns={"answer": None, "level": None})
    [score] = function.score_samples([sample])
    function.close()
    assert (score.status, score.value) == ("ok", 3.0)


def test_what_is_no_number_fails_its_own_response() -> None:
    found = scored([lambda solution_strs: [1.0, None, "x", torch.zeros(2)]], [row(text) for text in "abcd"])
    assert found == [{"score": 1.0}, None, "x", "tensor([0., 0.])"]
    with pytest.raises(RewardError, match=r"reward_1 returned Tensor tensor\(\[0., 0.\]\), not a number"):
        scored([lambda solution_str: torch.zeros(2)], [row("a")])


def test_async_functions_and_dicts() -> None:
    async def slow(solution_str: str, prompt: str) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"score": float(len(solution_str)), "asked": float(len(prompt))}

    async def all_long(completions: list[str]) -> list[float]:
        return [0.5 for _ in completions]

    found = scored([slow, right], [row("abc", "who?", answer="abc")])
    assert found == [{"score": 4.0, "slow": 3.0, "slow/asked": 4.0, "right": 1.0}]
    assert scored([slow, all_long], [row("abc", "who?")])[0]["score"] == 3.5


@pytest.mark.parametrize(
    ("functions", "weights", "words"),
    [
        ([], None, "there is no reward function"),
        ([lambda text: 1.0], None, "solution_str (one response"),
        ([right], [1, 2], "2 numbers for 1 reward functions"),
        ([right], [float("nan")], "no finite number"),
        ([right, lambda data: 1], None, "cannot be combined with others"),
        ([3], None, "3 is int, not a function"),
    ],
)
def test_what_is_no_reward_is_refused(functions: Any, weights: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        named_rewards(functions, weights)
    assert words in str(error.value)


def test_a_parameter_without_a_column_is_refused_before_the_run() -> None:
    check_columns(named_rewards([right, short, asked_and_right], None), ["prompt", "answer"])
    with pytest.raises(ConfigError, match=r"right\(.* needs answer, and data has no such column. Its columns: prompt"):
        check_columns(named_rewards([right], None), ["prompt"])


def test_another_process_imports_what_was_defined_here(tmp_path: Path) -> None:
    table = {"a": 1.0}
    path = write_module({"reward": lambda solution_str: table[solution_str]}, tmp_path)
    code = f"import runpy; print(runpy.run_path({str(path)!r})['reward']('a'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n"
    assert load_object(str(path), "reward", "custom_reward_function")("a") == 1.0
    table["a"] = 2.0
    assert write_module({"reward": lambda solution_str: table[solution_str]}, tmp_path) == path
    assert load_object(str(path), "reward", "custom_reward_function")("a") == 2.0
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="reward cannot be sent to the processes that call it"):
        write_module({"reward": lambda solution_str: lock.locked()}, tmp_path)


def test_types_as_texts_travel_with_a_tool() -> None:
    def add(a: int, b: list[int] | None = None) -> int:
        """Add."""
        return a

    copy = with_resolved_types(add)
    assert copy is not add
    assert copy.__annotations__ == {"a": int, "b": list[int] | None, "return": int}
    assert (copy(3), copy.__doc__, copy.__name__) == (3, "Add.", "add")


def test_a_parameter_with_another_name_for_the_response_is_answered_by_ours() -> None:
    def reward(completion, answer): ...

    with pytest.raises(ConfigError, match="Call its parameter completion solution_str"):
        named_rewards([reward], None)
