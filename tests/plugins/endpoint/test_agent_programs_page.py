"""The programs of docs/plugins/endpoint.md, with their YAML entries and options, train as they are printed."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

PAGE = (Path(__file__).parents[3] / "docs" / "plugins" / "endpoint.md").read_text()

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str.strip())
"""


def block(language: str, having: str) -> str:
    [found] = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if having in text]
    return found


@pytest.mark.parametrize(
    "name, file, having", [("calculator", "calculator.py", "DOUBLE ="), ("shell_agent", "agent.py", "OpenAI()")]
)
def test_a_program_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name, file, having):
    paths = make_tiny_run(tmp_path)
    (tmp_path / file).write_text(block("python", having))
    (tmp_path / "loops.yaml").write_text(block("yaml", f"name: {name}"))
    options = re.findall(r"(actor_rollout_ref\S+?)=(\S+)", block("bash", "agent_loop_config_path"))
    options = {key.replace(".", "__"): value for key, value in options}
    assert options["actor_rollout_ref__rollout__agent__default_agent_loop"] == "calculator"
    options["actor_rollout_ref__rollout__agent__default_agent_loop"] = name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    (tmp_path / "reward.py").write_text(REWARD)
    changes = {
        "custom_reward_function__path": "reward.py",
        "trainer__total_training_steps": 1,
        # A conversation of the shell's agent is a process that imports a vendor's client.
        "data__train_batch_size": 2,
        "actor_rollout_ref__rollout__n": 2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
        "trainer__rollout_data_dir": tmp_path / "rollouts",
    }
    run_ppo(compose(overrides(paths, tmp_path, **options, **changes)))
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["data"]
    ended = metrics["agent/status/done"] + metrics["agent/status/context_full"]
    assert ended == 1
    for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines():
        record = json.loads(line)
        (said,) = [message for message in record["trajectory"]["conversation"] if message["role"] == "assistant"]
        assert record["score"] == len(said["content"].strip())  # the program's answer is what the policy said
