"""A run's configuration with its files, small enough to write down, and what loading says about changes to it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from verl.config.base import BaseConfig
from verl.errors import ConfigError
from verl.testing.models import hollow_model_dir
from verl.trainer.config import EvalConfig, GenerationConfig, PPOConfig, load_config
from verl.trainer.config.command_line import compose
from verl.trainer.config.keys import put
from verl.trainer.config.overrides import keys_set

ROW = {"data_source": "countdown", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": 1}}


class Run:
    """Files under one folder, and the settings of a GRPO run and of a supervised run over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("train.jsonl", "val.jsonl"):
            (folder / name).write_text(json.dumps(ROW) + "\n")
        hollow_model_dir(folder / "model")
        self.ppo: dict[str, Any] = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": str(folder / "train.jsonl"),
            "data.val_files": str(folder / "val.jsonl"),
            "data.train_batch_size": 8,
            "actor_rollout_ref.model.path": str(folder / "model"),
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
            "trainer.logger": ["console"],
            "trainer.n_gpus_per_node": 2,
        }
        self.sft: dict[str, Any] = {
            "data.train_files": str(folder / "train.jsonl"),
            "data.train_batch_size": 8,
            "model.path": str(folder / "model"),
            "trainer.logger": ["console"],
        }

    def load(self, changes: dict[str, Any] | None = None, root: type[BaseConfig] = PPOConfig, explicit=()) -> Any:
        """The checked configuration with ``changes`` (dotted key → value)."""
        base = self.ppo if root is PPOConfig else self.sft
        if root in (GenerationConfig, EvalConfig):
            base = {}
        tree: dict[str, Any] = {}
        for key, value in (base | (changes or {})).items():
            put(tree, key, value)
        return load_config(tree, root, explicit)

    def refusal(self, changes: dict[str, Any], root: type[BaseConfig] = PPOConfig, explicit=()) -> str:
        """What loading says against ``changes``."""
        with pytest.raises(ConfigError) as caught:
            self.load(changes, root, explicit)
        return str(caught.value)

    def script(self, arguments: str, root: type[BaseConfig] = PPOConfig, config_name: str = "ppo_trainer") -> Any:
        """The checked configuration of a command line; ``$RUN`` is the folder of the files."""
        overrides = shlex.split(arguments.replace("\\\n", " ").replace("$RUN", str(self.folder)))
        return load_config(compose(overrides, config_name), root, keys_set(overrides))


def only(message: str) -> str:
    """The one problem in a message."""
    assert message.startswith("1 problem in the configuration"), message
    return message
