"""A whole run in miniature: a random model of two layers, countdown prompts, and the overrides to train on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from verl.testing.models import tiny_model_dir

NUMBERS = [[3, 4, 5], [7, 2, 9], [6, 1, 8], [2, 2, 4], [9, 5, 3], [8, 7, 6], [4, 1, 1], [5, 5, 2]]


def countdown_rows(count: int) -> list[dict]:
    """Rows with the schema of RL data; prompts of different lengths."""
    rows = []
    for i in range(count):
        numbers = NUMBERS[i % len(NUMBERS)][: 2 + i % 2]
        rows.append(
            {
                "data_source": "countdown",
                "prompt": [{"role": "user", "content": f"make {sum(numbers)} of {numbers}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": {"target": sum(numbers), "numbers": numbers}},
                "extra_info": {"split": "train", "index": i},
            }
        )
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_tiny_run(folder: Path, *, prompts: int = 16) -> dict[str, str]:
    """Model and data under ``folder``; their paths by name."""
    return {
        "model": tiny_model_dir(folder / "model", family="qwen3"),
        "reward_model": tiny_model_dir(folder / "reward_model", family="qwen3", task="sequence_classification"),
        "train": write_jsonl(folder / "train.jsonl", countdown_rows(prompts)),
        "val": write_jsonl(folder / "val.jsonl", countdown_rows(4)),
    }


def overrides(paths: dict[str, str], folder: Path, **changes: object) -> list[str]:
    """Command-line overrides of a small GRPO run on one rank in this process; ``changes`` by dotted key win.

    Dots are written as ``__``: ``trainer__controller="ray"``.
    """
    settings: dict[str, object] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": paths["train"],
        "data.val_files": paths["val"],
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 8,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": paths["model"],
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
        "critic.model.path": paths["model"],
        "critic.model.fsdp_config.dtype": "float32",
        "critic.ppo_micro_batch_size_per_gpu": 4,
        "critic.optim.lr": 1e-3,
        "reward_model.model.path": paths["reward_model"],
        "reward_model.micro_batch_size_per_gpu": 4,
        "trainer.controller": "local",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 2,
        "trainer.val_before_train": "false",
        "trainer.save_freq": -1,
        "trainer.logger": "[file]",
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.progress": "off",
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal, tensors bit by bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)
