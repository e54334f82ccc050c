"""Whole GRPO runs with the real vLLM; run by ``make test-vllm``, skipped where vLLM cannot be imported."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from verl.testing.models import tiny_model_dir
from verl.testing.tiny_run import make_tiny_run, overrides
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

pytestmark = pytest.mark.skipif(
    os.environ.get("VERL_TEST_VLLM") != "1" and importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here: make test-vllm",
)


KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def gaps_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[float]:
    """Of each of two steps: the largest difference between what vLLM and the trainer say of a sampled token."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
    paths = make_tiny_run(folder)
    paths["model"] = tiny_model_dir(folder / "model32", "qwen3", head_dim=32)
    settings = {
        "actor_rollout_ref__rollout__name": "vllm",
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 1,
        "actor_rollout_ref__rollout__enforce_eager": "true",
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
    }
    memory = f"+{KWARGS}.kv_cache_memory_bytes={64 * 2**20}"
    run_ppo(compose([*overrides(paths, folder, **(settings | changes)), memory]))
    steps = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [step["training/rollout_probs_diff_max"] for step in steps if "training/rollout_probs_diff_max" in step]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_grpo_with_vllm(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM says of its tokens is what the trainer computes, before and after an update."""
    gaps = gaps_of_a_run(tmp_path, monkeypatch, actor_rollout_ref__rollout__mode=mode)
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks_per_engine"), [("sync", 1), ("async", 1), ("async", 2)])
def test_grpo_on_two_ranks(
    mode: str, ranks_per_engine: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    """Two ranks with an engine each, inside or as a server, or with one that is split over both and fed by both."""
    changes = {"trainer__controller": "ray", "trainer__n_gpus_per_node": 2}
    engine = {
        "actor_rollout_ref__rollout__mode": mode,
        "actor_rollout_ref__rollout__tensor_model_parallel_size": ranks_per_engine,
    }
    gaps = gaps_of_a_run(tmp_path, monkeypatch, **changes, **engine)
    assert len(gaps) == 2
    assert max(gaps) < 1e-5
