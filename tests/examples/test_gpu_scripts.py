"""The scripts for GPU machines: their commands pass every check that needs no GPU, and settings after them win."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.trainer.config import PPOConfig, SFTConfig
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.trainer.config.overrides import keys_set

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/run_*.sh"))
COMMANDS = {"verl.trainer.main_ppo": ("ppo_trainer", PPOConfig), "verl.trainer.sft_trainer": ("sft_trainer", SFTConfig)}


def test_the_scripts_are_found():
    assert len(SCRIPTS) >= 4
    assert "grpo_trainer/run_qwen3-8b.sh" in SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_composes_and_takes_further_settings(script: str, tmp_path: Path):
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).touch()
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')  # in place of Python: what the script would run
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", EXAMPLES / script, "trainer.experiment_name=mine", "trainer.total_epochs=2"],
        env={**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}", "DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    flag, module, *overrides = done.stdout.splitlines()
    assert flag == "-m"
    name, root = COMMANDS[module]
    if root is PPOConfig:  # vLLM may live in another environment
        overrides.append(f"actor_rollout_ref.rollout.engine_kwargs.vllm.python={sys.executable}")
    config = load_config(compose(overrides, name), root, keys_set(overrides))
    assert (config.trainer.experiment_name, config.trainer.total_epochs) == ("mine", 2)
