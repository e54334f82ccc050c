"""The examples of docs/agents.md and docs/environments.md run as they are printed."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.simulated_user import SimulatedUser, UserAnswer
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.tools.threads import LoopThreads
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

DOCS = Path(__file__).parents[2] / "docs"


def block(page: str, language: str, having: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    found = [text for text in blocks if having in text]
    assert len(found) == 1
    return found[0]


def test_the_loop_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    (tmp_path / "look_again.py").write_text(block("agents.md", "python", "class LookAgain"))
    (tmp_path / "loops.yaml").write_text(block("agents.md", "yaml", "look_again"))
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    changes = {
        "data__max_response_length": 64,
        "actor_rollout_ref__rollout__name": "native",
        "actor_rollout_ref__rollout__agent__agent_loop_config_path": "loops.yaml",
        "actor_rollout_ref__rollout__agent__default_agent_loop": "look_again",
        "trainer__total_training_steps": 1,
    }
    run_ppo(compose(overrides(paths, tmp_path, **changes)))
    metrics = json.loads(log.read_text().splitlines()[-1])["data"]
    assert metrics["agent/status/done"] == 1
    assert metrics["num_turns/mean"] == 4
    assert metrics["training/rollout_probs_diff_max"] < 1e-5


def test_the_user_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shorter.py").write_text(block("environments.md", "python", "class Shorter"))
    (tmp_path / "users.yaml").write_text(block("environments.md", "yaml", "interaction:"))
    monkeypatch.chdir(tmp_path)
    users = initialize_interactions_from_config("users.yaml")
    assert sorted(users) == ["gsm8k", "shorter"]

    async def said() -> list[UserAnswer]:
        user = SimulatedUser.from_row(users, {"name": "shorter", "words": 2}, 5, LoopThreads())
        assert user is not None
        async with user:
            return [await user.answer([{"role": "assistant", "content": text}]) for text in ("one two three", "one")]

    first, second = asyncio.run(said())
    assert first == UserAnswer(False, "At most 2 words, please.", 0.0)
    assert (second.is_end, second.score) == (True, 1.0)
