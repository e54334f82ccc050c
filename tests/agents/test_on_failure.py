"""What becomes of failed trajectories in whole runs: in training, with dynamic sampling, in validation, in dumps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

LOOP = """
import threading
from collections import Counter
from verl.agents.loop import TrajectoryError
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Ends(AgentLoopBase):
    # The first `times` trajectories of a prompt end as its row says, the others are done.
    begun, lock = Counter(), threading.Lock()

    async def run(self, sampling_params, **row):
        prompt = row["raw_prompt_ids"]
        drawn = await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=sampling_params)
        status, times = row["extra_info"]["ends"]
        with self.lock:
            number = self.begun[row["extra_info"]["name"]]
            self.begun[row["extra_info"]["name"]] += 1
        if number < times:
            raise TrajectoryError(f"number {number} fails", status)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=drawn.token_ids, response_mask=[1] * len(drawn.token_ids), num_turns=2)
"""
ALWAYS = 99


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run on prompts that end as given; the metrics of every step."""
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1.0, 'acc': True}\n"
    )
    (tmp_path / "my_loop.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: ends, _target_: Ends, path: {tmp_path}/my_loop.py}}\n")
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def data(name: str, ends: list[tuple[str, int]]) -> str:
        rows = countdown_rows(len(ends))
        for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
            row["extra_info"] |= {"ends": end, "name": f"{name} {number}"}
        return write_jsonl(tmp_path / f"{name}.jsonl", rows)

    def run(ends: list[tuple[str, int]], **changes: Any) -> dict[int, dict[str, float]]:
        settings = {
            "custom_reward_function__path": tmp_path / "reward.py",
            "actor_rollout_ref__rollout__agent__agent_loop_config_path": tmp_path / "loops.yaml",
            "actor_rollout_ref__rollout__agent__default_agent_loop": "ends",
            "actor_rollout_ref__rollout__agent__on_failure": (
                "{timeout: mask, tool_error: zero, environment_error: train, agent_error: redraw, cancelled: mask}"
            ),
            "data__shuffle": "false",
            "data__train_files": data("train", ends),
            "data__val_files": data(
                "val", [("done", 0), ("timeout", ALWAYS), ("tool_error", ALWAYS), ("environment_error", ALWAYS)]
            ),
            "trainer__rollout_data_dir": tmp_path / "rollouts",
            "trainer__validation_data_dir": tmp_path / "validation",
            "trainer__total_training_steps": 1,
        }
        run_ppo(compose(overrides(paths, tmp_path, **(settings | changes))))
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return {record["step"]: record["data"] for record in records}

    return run


def dumped(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_status_is_treated_as_on_failure_says(train, tmp_path: Path):
    # Five prompts of four trajectories; the reward function gives 1 to what it sees.
    ends = [("timeout", 1), ("tool_error", 1), ("environment_error", 1), ("agent_error", 1), ("cancelled", ALWAYS)]
    steps = train(
        ends,
        data__train_batch_size=5,
        actor_rollout_ref__actor__ppo_mini_batch_size=5,
        trainer__val_before_train="true",
    )
    metrics = steps[1]
    failed = {"timeout": 1, "tool_error": 1, "environment_error": 1, "agent_error": 0, "cancelled": 4}
    found = {status: metrics[f"agent/status/{status}"] for status in failed}
    assert found == pytest.approx({status: count / 20 for status, count in failed.items()})  # agent_error: drawn again
    # 15 are trained on: all but the one that took too long and the four that were cancelled. One of them has score 0.
    assert metrics["reward/left_out_rate"] == pytest.approx(5 / 20)
    assert metrics["reward/error_rate"] == 0  # nothing that was scored failed
    assert metrics["critic/score/mean"] == metrics["reward/acc/mean"] == pytest.approx(14 / 15)
    # Only the group of the zero has scores that differ: 11 of 15 teach nothing.
    assert metrics["critic/advantages/zero_ratio"] == pytest.approx(11 / 15)

    records = dumped(tmp_path / "rollouts" / "1.jsonl")
    odd = {row["trajectory"]["status"]: row for row in records if row["trajectory"]["status"] != "done"}
    assert {status: row["reward_status"] for status, row in odd.items()} == {
        "timeout": "trajectory: timeout",
        "tool_error": "ok",
        "environment_error": "ok",
        "cancelled": "trajectory: cancelled",
    }
    assert {status: (row["score"], row["trajectory"]["turn_scores"]) for status, row in odd.items()} == {
        "timeout": (0, [0]),
        "tool_error": (0, [0]),
        "environment_error": (1, [1]),
        "cancelled": (0, [0]),
    }
    for row in records:
        told = row["trajectory"]
        assert told["message"].endswith("fails") == (told["status"] != "done")
        assert [part["role"] for part in told["conversation"]] == ["assistant"]
        assert told["response_mask"] == [[1, len(told["response_ids"])]]
        assert (told["agent_name"], told["agent"]) == ("ends", "main")
    assert len({row["trajectory"]["id"] for row in records}) == 20

    # Validation leaves out the one that took too long; the other three have 1, 0 and 1.
    before = steps[0]
    assert before["val-core/countdown/acc/mean@1"] == pytest.approx(2 / 3)
    assert before["val-aux/countdown/reward/mean@1"] == pytest.approx(2 / 3)
    assert before["val-aux/error_rate"] == before["val-aux/agent/status/timeout"] == 0.25
    assert before["val-aux/num_turns/mean"] == 2
    kept = {row["trajectory"]["status"]: row["reward_status"] for row in dumped(tmp_path / "validation" / "0.jsonl")}
    assert kept["timeout"] == "trajectory: timeout"
    assert set(kept) == {"done", "timeout", "tool_error", "environment_error"}


def test_dynamic_sampling_draws_further_prompts_where_groups_fail(train):
    # Of each batch of four prompts only that with a zero has scores that differ; two such are needed.
    four = [("cancelled", ALWAYS), ("timeout", 1), ("tool_error", 2), ("done", 0)]
    metrics = train(
        four * 3,
        algorithm__filter_groups__enable="true",
        algorithm__filter_groups__metric="acc",
        data__train_batch_size=2,
        data__gen_batch_size=4,
        trainer__test_freq=-1,
    )[1]
    assert metrics["training/filter_groups/num_gen_batches"] == 2
    assert metrics["training/filter_groups/kept_ratio"] == 2 / 8
    assert metrics["critic/score/mean"] == 0.5  # two of four, in both groups
    # All that was drawn is counted, 32 trajectories.
    shares = {status: metrics[f"agent/status/{status}"] for status in ("cancelled", "timeout", "tool_error", "done")}
    assert shares == pytest.approx({"cancelled": 8 / 32, "timeout": 2 / 32, "tool_error": 4 / 32, "done": 18 / 32})
