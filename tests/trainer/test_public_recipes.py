"""Public recipes in their own style, on a tiny model and to the end: one file with data set, tool and reward (retool),
a tool that keeps a state for each trajectory (the tool example), a simulated user (the interaction example), a custom
reward on generated strings (char_count).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.scripted_agent import STOP_TOKEN_IDS, call
from tests.support.tiny_run import make_tiny_run, overrides
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

pytestmark = pytest.mark.slow

RETOOL = '''
import datasets

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.dataset import RLHFDataset
from verl.utils.rollout_trace import rollout_trace_op


class CustomSandboxTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.rate_limit = config["rate_limit"]

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict, **kwargs) -> tuple[ToolResponse, float, dict]:
        return ToolResponse(text=str(parameters.get("code", ""))), 0.0, {}


class CustomRLHFDataset(RLHFDataset):
    """Builds its rows itself."""

    def _read_files_and_tokenize(self):
        rows = []
        for file in self.data_files:
            frame = datasets.load_dataset("json", data_files=file)["train"]
            for row in frame:
                rows.append({
                    "data_source": "math_dapo",
                    "prompt": row["prompt"],
                    "ability": "MATH",
                    "reward_model": {"ground_truth": "12"},
                    "agent_name": "tool_agent",
                })
        self.dataframe = datasets.Dataset.from_list(rows)


def compute_score(data_source, solution_str, ground_truth, extra_info):
    result = {"score": sum(c.isdigit() for c in solution_str) / 8, "acc": False, "pred": solution_str[:2]}
    result["score"] += 0.1 * (extra_info["num_turns"] - 2)
    return result
'''

SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code."}},
            "required": ["code"],
        },
    },
}

ANSWER_TOOL = '''
import os
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class AnswerTool(BaseTool):
    """Scores the answers that the model tries."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        ground_truth = kwargs.get("create_kwargs", {})["ground_truth"]
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        state = self._instance_dict[instance_id]
        state["response"] = parameters.get("answer", "")
        reward = await self.calc_reward(instance_id)
        tool_reward = 0.5 if reward > state["reward"] else -0.25
        state["reward"] = reward
        return ToolResponse(text=f"{reward}"), tool_reward, {"tried": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return 1.0 if state["response"] == state["ground_truth"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        state = self._instance_dict.pop(instance_id)
        with open(os.path.join(self.config["folder"], "released.txt"), "a") as file:
            file.write(f"{state['ground_truth']} {state['response']} {state['reward']}\\n")


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(extra_info["tool_rewards"]) + sum(c.isdigit() for c in solution_str) / 1024
'''

CHAR_COUNT = """
def char_count_reward_function(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if "3" in solution_str else 0.0
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run with changed settings; the metrics of every step."""
    paths = make_tiny_run(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(**changes: Any) -> dict[int, dict[str, float]]:
        run_ppo(compose(overrides(paths, tmp_path, trainer__total_training_steps=2, **changes)))
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return {record["step"]: record["data"] for record in records}

    return run


def test_retool(train, tmp_path: Path):
    (tmp_path / "retool.py").write_text(RETOOL)
    tool = {"class_name": "retool.CustomSandboxTool", "config": {"rate_limit": 8, "type": "native"}}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [tool | {"tool_schema": SCHEMA}]}))
    steps = train(
        data__return_raw_chat="True",
        data__max_prompt_length=512,
        data__custom_cls__path=tmp_path / "retool.py",
        data__custom_cls__name="CustomRLHFDataset",
        custom_reward_function__path=tmp_path / "retool.py",
        custom_reward_function__name="compute_score",
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__multi_turn__enable="True",
        actor_rollout_ref__rollout__multi_turn__max_user_turns=4,
        actor_rollout_ref__rollout__multi_turn__max_assistant_turns=4,
        actor_rollout_ref__rollout__multi_turn__tool_config_path=tmp_path / "tools.yaml",
        actor_rollout_ref__rollout__multi_turn__format="hermes",
    )
    assert steps[2]["actor/grad_norm"] > 0
    assert steps[2]["num_turns/min"] >= 2


def test_a_tool_with_a_state_for_each_trajectory(train, tmp_path: Path):
    """The calls stand in the rows, for a random policy writes none; the rest is the tool agent's."""
    (tmp_path / "answers.py").write_text(ANSWER_TOOL)
    function = {
        "name": "check_answer",
        "description": "Check an answer.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        },
    }
    tool = {"class_name": "answers.AnswerTool", "config": {"type": "native", "folder": str(tmp_path)}}
    schema = {"type": "function", "function": function}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [tool | {"tool_schema": schema}]}))
    (tmp_path / "loops.yaml").write_text("- {name: scripted, _target_: tests.support.scripted_agent.ScriptedAgent}\n")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["agent_name"] = "scripted"
        row["script"] = json.dumps([[call("check_answer", answer="?")], [call("check_answer", answer=str(number))]])
        row["extra_info"]["need_tools_kwargs"] = True
        row["extra_info"]["tools_kwargs"] = {"check_answer": {"create_kwargs": {"ground_truth": str(number)}}}
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = train(
        data__return_raw_chat="True",
        data__max_response_length=256,
        data__shuffle="False",
        custom_reward_function__path=tmp_path / "answers.py",
        trainer__rollout_data_dir=tmp_path / "rollouts",
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__stop_token_ids=STOP_TOKEN_IDS,
        actor_rollout_ref__rollout__multi_turn__enable="True",
        actor_rollout_ref__rollout__multi_turn__max_assistant_turns=4,
        actor_rollout_ref__rollout__multi_turn__tool_config_path=tmp_path / "tools.yaml",
        actor_rollout_ref__rollout__agent__agent_loop_config_path=tmp_path / "loops.yaml",
    )
    for step in (1, 2):
        assert steps[step]["actor/grad_norm"] > 0
        assert steps[step]["agent/status/done"] == 1
        assert steps[step]["num_turns/mean"] == 6  # prompt, call, result, call, result, answer
        samples = [json.loads(line) for line in (tmp_path / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
        assert len(samples) == 16
        for sample in samples:
            talk = sample["trajectory"]["conversation"]
            assert [turn["content"] for turn in talk if turn["role"] == "tool"] == ["0.0", "1.0"]
            assert sample["score"] == pytest.approx(0.25, abs=0.1)  # -0.25 for '?', 0.5 for the truth, and digits
    released = (tmp_path / "released.txt").read_text().splitlines()
    # Of the two steps, four responses to each of eight prompts: each state with its own truth, released once.
    assert sorted(released) == sorted(f"{number} {number} 1.0" for number in range(8) for _ in range(4))


def test_an_interaction(train, tmp_path: Path):
    user = {"name": "gsm8k", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}
    (tmp_path / "interaction.yaml").write_text(yaml.safe_dump({"interaction": [user]}))
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for name in ("train", "val"):
        for row in rows:
            row["extra_info"]["interaction_kwargs"] = {"name": "gsm8k", "query": "1+1?", "ground_truth": "2"}
            row["data_source"], row["agent_name"] = "openai/gsm8k", "tool_agent"
            row["reward_model"] = {"style": "rule", "ground_truth": "2"}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "digits.py").write_text(CHAR_COUNT)
    steps = train(
        data__return_raw_chat="True",
        data__max_response_length=64,
        custom_reward_function__path=tmp_path / "digits.py",
        custom_reward_function__name="char_count_reward_function",
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__multi_turn__enable="True",
        actor_rollout_ref__rollout__multi_turn__max_assistant_turns=2,
        actor_rollout_ref__rollout__multi_turn__interaction_config_path=tmp_path / "interaction.yaml",
    )
    assert steps.keys() >= {1, 2}
    assert steps[2]["num_turns/max"] >= 2


def test_char_count(train, tmp_path: Path):
    (tmp_path / "reward_function.py").write_text(CHAR_COUNT)
    steps = train(
        reward_model__reward_manager="naive",
        custom_reward_function__path=tmp_path / "reward_function.py",
        custom_reward_function__name="char_count_reward_function",
        actor_rollout_ref__actor__use_kl_loss="True",
        actor_rollout_ref__actor__kl_loss_coef=0.001,
        actor_rollout_ref__actor__kl_loss_type="low_var_kl",
    )
    assert steps[2]["actor/kl_loss"] >= 0
    assert 0 <= steps[2]["critic/score/mean"] <= 1
