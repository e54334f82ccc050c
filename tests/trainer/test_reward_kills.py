"""Whole runs while all processes that score are killed, again and again: every number is that of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from tests.trainer.test_run import assert_same_steps
from tests.workers.reward_manager.test_killed_scorers import massacres
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

PLAIN = (
    "import time\n"
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    "    time.sleep(0.05)\n"
    "    return sum(c.isdigit() for c in solution_str) / 8\n"
)
ASYNC = PLAIN.replace("import time", "import asyncio").replace("def ", "async def ").replace("time.", "await asyncio.")


@pytest.mark.parametrize(
    ("reward", "changes"),
    [
        (PLAIN, {"reward_model__launch_reward_fn_async": "true"}),
        pytest.param(
            ASYNC,
            {
                "algorithm__filter_groups__enable": "true",
                "algorithm__filter_groups__metric": "seq_reward",
                "data__gen_batch_size": 2,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["beside the log-probs", "dynamic sampling"],
)
def test_killed_scorers_change_no_number(
    reward: str, changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, paths = tmp_path / "metrics.jsonl", make_tiny_run(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    (tmp_path / "reward.py").write_text(reward)
    settings = changes | {
        "custom_reward_function__path": tmp_path / "reward.py",
        "trainer__total_training_steps": 2,
        "trainer__save_freq": -1,
    }
    retries = "+reward_model.reward_kwargs.kill_retries=100"

    def train() -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        run_ppo(compose([*overrides(paths, tmp_path, **settings), retries]))
        return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}

    undisturbed = train()
    with massacres(rounds=5, every_s=0.25) as killed:
        disturbed = train()
    assert killed
    assert undisturbed[1]["reward/error_rate"] == 0
    assert_same_steps(undisturbed, disturbed, rel=0)
