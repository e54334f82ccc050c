"""The commands of the quickstart for agents: what ``sft_trainer`` and ``main_ppo`` are told.

One rank in one process (``trainer.controller=local``) in fp32. On a cluster the same lists run with
``trainer.controller=ray`` and more ranks.
"""

from __future__ import annotations

from pathlib import Path

from examples.quickstart.settings import Settings, run_settings

SFT_STEPS = 240
RL_STEPS = 30
PROMPT_LENGTH, RESPONSE_LENGTH = 8, 40
MOST_TURNS = 4
"""Of the policy: two look-ups, an answer, and one more for a call that failed."""


def sft_settings(task: Path, output: Path, seed: int) -> Settings:
    """The supervised warm-up: short on purpose, so that RL has something left to teach."""
    return {
        "data.train_files": task / "sft_train.parquet",
        "data.train_batch_size": 32,
        "data.max_length": PROMPT_LENGTH + RESPONSE_LENGTH,
        "data.num_workers": 0,
        "model.path": task / "model",
        "model.enable_gradient_checkpointing": False,
        "engine.dtype": "float32",
        "optim.lr": 2e-3,
        "optim.lr_scheduler_type": "cosine",
        "optim.lr_warmup_steps": 20,
        "checkpoint.save_contents": "[model,hf_model]",
        "trainer.total_training_steps": SFT_STEPS,
        "trainer.save_freq": SFT_STEPS,
        **run_settings(output, seed),
    }


def rl_settings(task: Path, model: Path, output: Path, seed: int) -> Settings:
    """GRPO over conversations with the tool, from the model of the warm-up."""
    turns = "actor_rollout_ref.rollout.multi_turn"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": task / "rl_train.parquet",
        "data.val_files": task / "rl_test.parquet",
        "data.train_batch_size": 16,
        "data.max_prompt_length": PROMPT_LENGTH,
        "data.max_response_length": RESPONSE_LENGTH,
        "data.dataloader_num_workers": 0,
        "data.seed": seed,
        "custom_reward_function.path": Path(__file__).with_name("reward.py"),
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.optim.lr": 3e-4,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.max_num_seqs": 512,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        f"{turns}.enable": True,
        f"{turns}.tool_config_path": task / "tools.yaml",
        f"{turns}.format": "hermes",
        f"{turns}.max_assistant_turns": MOST_TURNS,
        f"{turns}.max_tool_response_length": 2,
        "trainer.total_training_steps": RL_STEPS,
        "trainer.val_before_train": True,
        "trainer.test_freq": 10,
        "trainer.save_freq": RL_STEPS,
        "trainer.validation_data_dir": output / "validation",
        **run_settings(output, seed),
    }
