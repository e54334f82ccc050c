"""Whole GRPO runs with the real vLLM; run by ``make test-vllm``, skipped where vLLM cannot be imported."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.models import tiny_model_dir
from tests.tiny_run import make_tiny_run, overrides
from verl.trainer.config.overrides import compose
from verl.trainer.main_ppo import run_ppo

pytestmark = pytest.mark.skipif(
    os.environ.get("VERL_TEST_VLLM") != "1" and importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here: make test-vllm",
)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_grpo_with_vllm(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps: what vLLM says of its tokens is what the trainer computes, before and after an update."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    paths = make_tiny_run(tmp_path)
    paths["model"] = tiny_model_dir(tmp_path / "model32", "qwen3", head_dim=32)
    settings = {
        "actor_rollout_ref__rollout__name": "vllm",
        "actor_rollout_ref__rollout__mode": mode,
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 1,
        "actor_rollout_ref__rollout__enforce_eager": "true",
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
    }
    memory = "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864"
    run_ppo(compose([*overrides(paths, tmp_path, **settings), memory]))
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gaps = [gap for step in steps if (gap := step["data"].get("training/rollout_probs_diff_max")) is not None]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5
