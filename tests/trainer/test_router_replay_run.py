"""Whole runs with router replay: the choice of experts reaches the update, through the driver and its ranks."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from verl.testing.models import tiny_tokenizer
from verl.testing.tiny_run import make_tiny_run, overrides
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

SHAPE = {"vocab_size": 104, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SHAPE |= {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHAPE |= {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_run_replays(mode, tmp_path, monkeypatch):
    paths = make_tiny_run(tmp_path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE)).save_pretrained(tmp_path / "experts")
    tiny_tokenizer().save_pretrained(tmp_path / "experts")
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    settings = {
        "actor_rollout_ref__model__path": tmp_path / "experts",
        "actor_rollout_ref__actor__router_replay__mode": mode,
        "actor_rollout_ref__rollout__enable_rollout_routing_replay": mode == "R3",
        "actor_rollout_ref__rollout__name": "native",
        "custom_reward_function__path": tmp_path / "reward.py",
        "trainer__total_training_steps": 2,
        "trainer__test_freq": 1,
        "trainer__save_freq": -1,
    }
    run_ppo(compose(overrides(paths, tmp_path / "run", **settings)))
    for step in map(json.loads, log.read_text().splitlines()):
        metrics = step["data"]
        if "actor/grad_norm" not in metrics:  # validation before the run
            continue
        assert metrics["actor/grad_norm"] > 0
        assert metrics["moe/load_max"] >= 1
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
