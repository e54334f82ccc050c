"""A whole run while its rollout engine is killed, again and again: every number is that of an undisturbed run."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from tests.trainer.test_run import assert_same_steps
from tests.workers.rollout.test_remote import killer
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.workers.rollout import remote

SMALL_ENGINE = Path(__file__).parents[1] / "workers" / "rollout" / "small_engine.py"


@pytest.mark.slow
def test_a_killed_engine_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is a small program with vLLM's protocol; its tokens depend on the trainer's weights, to the bit."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.05)
    log, engine = tmp_path / "metrics.jsonl", tmp_path / "python"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    monkeypatch.setenv("SMALL_ENGINE_FOLDER", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(map(ord, solution_str)) % 7 / 7\n"
    )
    engine.write_text(f"#!{sys.executable}\n{SMALL_ENGINE.read_text()}")
    engine.chmod(0o700)
    paths = make_tiny_run(tmp_path)
    paths["model"] = tiny_model_dir(tmp_path / "model32", "qwen3", head_dim=32)
    settings = {
        "actor_rollout_ref__rollout__name": "vllm",
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 1,
        "custom_reward_function__path": tmp_path / "reward.py",
        "trainer__total_training_steps": 4,
        "trainer__save_freq": -1,
    }
    python = f"+actor_rollout_ref.rollout.engine_kwargs.vllm.python={engine}"

    def train() -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        run_ppo(compose([*overrides(paths, tmp_path, **settings), python]))
        return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}

    undisturbed = train()
    for moment in ("load", "reset", "core"):
        for path in tmp_path.glob(f"{moment}-*"):
            path.unlink()
    # Two engines in a row are killed while they take the first weights, and the core of the third one after them.
    (tmp_path / "plan.json").write_text('{"load": 2, "reset": 1}')
    with killer(tmp_path, "load", most=2) as first, killer(tmp_path, "reset", "core", most=1) as second:
        disturbed = train()
    gc.collect()  # the engine ends with the run
    assert (len(first), len(second)) == (2, 1)
    assert list(undisturbed) == [1, 2, 3, 4]
    assert undisturbed[4]["actor/grad_norm"] > 0
    assert_same_steps(undisturbed, disturbed, rel=0)
