"""Scores that agent loops give: on the last token of the whole, or of each turn of the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.chat_templates import chat_tokenizer
from verl.config import AgentLoopConfig, DataConfig, MultiTurnConfig, RolloutConfig
from verl.datasets import RLHFDataset
from verl.errors import ConfigError, DataError
from verl.experience.trajectories import check_tools, complete_scores, rows_to_score
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

CASES = [
    # mask, status, reward_score, turn_scores; scores on tokens, reward_status
    ([1, 1, 0, 1, 0], "done", None, [0.25, 0.5], [0, 0.25, 0, 0.5, 0], "ok"),
    ([1, 1, 0, 1, 0], "done", 2.0, None, [0, 0, 0, 2, 0], "ok"),
    ([1, 0, 1, 0, 1], "turns_used_up", 1.5, [1.0, 0.0, 0.5], [1, 0, 0, 0, 0.5], "ok"),
    ([1, 0, 1, 0, 0], "done", None, [1.0], [0, 0, 0, 0, 0], "error"),
    ([1, 0, 1, 0, 0], "done", None, [1.0, float("nan")], [0, 0, 0, 0, 0], "error"),
    ([1, 0, 1, 0, 0], "done", 5.0, [1.0, 1.0], [0, 0, 0, 0, 0], "error"),
    ([1, 0, 1, 0, 0], "environment_error", None, [1.0, 1.0], [0, 0, 0, 0, 0], "trajectory: environment_error"),
    ([1, 1, 1, 0, 0], "done", None, None, [0, 0, 9, 0, 0], "ok"),  # of the reward function
]


def column(values: list) -> np.ndarray:
    return np.fromiter(values, dtype=object, count=len(values))


def test_scores_of_loops_are_placed_on_the_turns_of_the_policy(caplog: pytest.LogCaptureFixture):
    masks, statuses, wholes, turns, wanted, reward_statuses = map(list, zip(*CASES, strict=True))
    batch = DataProto.from_dict(
        tensors={"response_mask": torch.tensor(masks)},
        non_tensors={
            "trajectory_status": column(statuses), "reward_score": column(wholes), "turn_scores": column(turns),
        },
    )  # fmt: skip
    agent = AgentLoopConfig()
    rows = rows_to_score(batch, agent)
    assert rows == [7]
    scored = torch.tensor([[0.0, 0, 9, 0, 0]]), {"score": [9.0], "reward_status": ["ok"]}
    scores, extra = complete_scores(batch, scored, rows, agent)
    assert scores.tolist() == wanted
    assert extra["reward_status"] == reward_statuses
    assert extra["score"] == [0.75, 2.0, 1.5, 0.0, 0.0, 0.0, 0.0, 9.0]
    for problem in ["1 turn_scores, but the policy had 2 turns", "nan, not a finite", "score=5, and turn_scores whose"]:
        assert problem in caplog.text


def test_rewards_of_turns_are_added_to_the_score_whoever_gave_it():
    mask = torch.tensor([[1, 1, 0, 1]] * 6)
    batch = DataProto.from_dict(
        tensors={"response_mask": mask},
        non_tensors={
            "trajectory_status": column(["done"] * 4 + ["timeout", "done"]),
            "reward_score": column([None, 2.0, None, None, None, 1.0]),
            "turn_scores": column([None, None, [0.5, 1.0], None, None, None]),
            "turn_rewards": column([[-0.25, -0.5], [-0.25, 0.0], [-0.25, 0.0], None, [-0.25, 0.0], [-0.25]]),
        },
    )
    agent = AgentLoopConfig(on_failure={"timeout": "zero"})
    rows = rows_to_score(batch, agent)
    assert rows == [0, 3]
    scored = torch.tensor([[0.0, 0, 0, 3.0]] * 2), {"score": [3.0] * 2, "reward_status": ["ok"] * 2}
    scores, extra = complete_scores(batch, scored, rows, agent)
    assert scores.tolist() == [
        [0, -0.25, 0, 2.5],
        [0, -0.25, 0, 2.0],
        [0, 0.25, 0, 1.0],
        [0, 0, 0, 3.0],
        [0, 0, 0, 0],  # what is scored 0 stays so
        [0, 0, 0, 0],  # two turns, and a reward for one
    ]
    assert extra["score"] == [3.0, 2.0, 1.5, 3.0, 0.0, 0.0]  # what the score was given as
    assert extra["reward_status"] == ["ok"] * 5 + ["error"]


def test_a_trajectory_that_is_scored_0_has_0_for_all_numbers_of_the_reward_function():
    batch = DataProto.from_dict(
        tensors={"response_mask": torch.tensor([[1, 1], [1, 0]])},
        non_tensors={"trajectory_status": column(["done", "timeout"])},
    )
    agent = AgentLoopConfig(on_failure={"timeout": "zero"})
    values = {"score": [1.0], "reward_status": ["ok"], "acc": [True], "pred": ["7"]}
    scores, extra = complete_scores(batch, (torch.tensor([[0.0, 1.0]]), values), [0], agent)
    assert scores.tolist() == [[0, 1], [0, 0]]
    assert extra == {"score": [1, 0], "reward_status": ["ok", "ok"], "acc": [True, 0], "pred": ["7", None]}


def test_the_turn_that_was_better_is_rewarded():
    """Two siblings of two turns: the first turns score 1 and 0, the second ones the same."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]])
    batch = DataProto.from_dict(
        tensors={"response_mask": mask},
        non_tensors={
            "trajectory_status": column(["done", "done"]), "turn_scores": column([[1.0, 0.5], [0.0, 0.5]]),
        },
    )  # fmt: skip
    scores, _ = complete_scores(batch, (torch.zeros(0), {}), [], AgentLoopConfig())
    assert scores.tolist() == [[0, 1, 0, 0.5], [0, 0, 0, 0.5]]
    advantages, _ = get_adv_estimator_fn("grpo_per_turn")(
        token_level_rewards=scores, response_mask=mask, index=np.array(["a", "a"], dtype=object)
    )
    # Returns of the first turns: 1.5 and 0.5, one standard deviation (sqrt 1/2) apart by 1/sqrt 2; of the second equal.
    half = 2**-0.5
    assert advantages.tolist() == [
        pytest.approx([half, half, 0, 0], abs=1e-5),
        pytest.approx([-half, 0, 0, 0], abs=1e-5),
    ]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def prompts(folder: Path, row: dict[str, Any]) -> RLHFDataset:
    (folder / "x.jsonl").write_text(json.dumps({"prompt": "Hi", **row}))
    return RLHFDataset(str(folder / "x.jsonl"), chat_tokenizer("chatml"), DataConfig())


def rollout(is_enabled: bool) -> RolloutConfig:
    return RolloutConfig(name="hf", multi_turn=MultiTurnConfig(enable=is_enabled, function_tool_path="tools.py"))


def test_tools_that_no_prompt_could_call(tmp_path: Path):
    plain, calling = prompts(tmp_path, {}), prompts(tmp_path, {"agent_name": "tool_agent"})
    with pytest.raises(
        ConfigError, match=r"function_tool_path='tools.py' gives the model tools, .*multi_turn.enable=true"
    ):
        check_tools([plain, plain], rollout(False), [TOOL])
    for datasets, is_enabled in (([plain, plain], True), ([plain, calling], False), ([plain, object()], False)):
        check_tools(datasets, rollout(is_enabled), [TOOL])
    check_tools([plain], rollout(False), [])


def test_tools_of_rows_that_an_agent_loop_would_not_show(tmp_path: Path):
    with pytest.raises(
        DataError, match=r"row 0 has tools, and the agent loop environment_agent answers it, which shows"
    ):
        check_tools([prompts(tmp_path, {"tools": [TOOL], "agent_name": "environment_agent"})], rollout(False), [])
    with pytest.raises(DataError, match=r"row 0 has tools, and the agent loop tool_agent answers it"):
        check_tools([prompts(tmp_path, {"tools": [TOOL]})], rollout(True), [])
    check_tools([prompts(tmp_path, {"tools": [TOOL]})], rollout(False), [])  # in one turn they are shown
    check_tools([prompts(tmp_path, {"tools": [TOOL], "agent_name": "my_own"})], rollout(True), [])
