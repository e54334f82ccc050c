"""The examples of docs/environments.md and docs/plugins/environments.md run as they are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.environments.registry import read_environments
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

DOCS = Path(__file__).parents[2] / "docs"


def block(language: str, having: str, page: str = "environments.md") -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    found = [text for text in blocks if having in text]
    assert len(found) == 1
    return found[0]


def test_the_environments_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    prompt = [{"role": "user", "content": "Climb."}]  # rows of environments need neither data source nor truth
    rows = [{"prompt": prompt, "extra_info": {"environment_kwargs": {"name": name}}} for name in ("guess", "stairs")]
    rows[1]["extra_info"]["environment_kwargs"]["top"] = 3
    for name in ("train", "val"):
        Path(paths[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "stairs.py").write_text(block("python", "class Stairs"))
    (tmp_path / "environments.yaml").write_text(block("yaml", "stairs.py"))
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    words = block("bash", "environment_agent").replace("\\\n", " ").split("…")[1].split()
    settings = {
        "data__train_batch_size": 2,
        "data__max_prompt_length": 160,
        "data__max_response_length": 256,
        "trainer__total_training_steps": 1,
        "trainer__rollout_data_dir": tmp_path / "rollouts",
    }
    run_ppo(compose([*overrides(paths, tmp_path, **settings), *words]))
    metrics = json.loads(log.read_text().splitlines()[-1])["data"]
    statuses = ("done", "turns_used_up", "context_full")
    assert sum(metrics[f"agent/status/{status}"] for status in statuses) == 1
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    dumped = (tmp_path / "rollouts" / "1.jsonl").read_text()
    assert "You stand below 3 stairs." in dumped
    assert "Guess my number from 0 to 20. You have 5 guesses." in dumped


def test_gymnasium_of_the_page(tmp_path: Path):
    (tmp_path / "environments.yaml").write_text(block("yaml", "FrozenLake-v1", "plugins/environments.md"))
    [lake] = read_environments(str(tmp_path / "environments.yaml")).values()
    environment = lake.cls(lake.config)
    # The map of FrozenLake-v1: SFFF FHFH FFFH HFFG; the colours of the terminal mark where the player stands.
    picture = environment.reset(seed=3, messages=[])
    assert re.sub(r"\x1b\[\d+m", "", str(picture)).split() == ["SFFF", "FHFH", "FFFH", "HFFG"]
    way = ["down", "I look, then go down.", "right", "down", "hm", "RIGHT", "right"]
    steps = [environment.step(action) for action in way]
    assert [step[1] for step in steps] == [0, 0, 0, 0, -0.1, 0, 1]
    assert [step[2] for step in steps] == [False] * 6 + [True]
    assert steps[4][0] == "There is no action in that. Answer one of: left, down, right, up."
    environment.close()
    environment.close()
