"""The commands of the quickstart: what ``verl.trainer.sft_trainer`` and ``verl.trainer.main_ppo`` are told.

One rank in one process (``trainer.controller=local``) in fp32. On a cluster the same lists run with
``trainer.controller=ray`` and more ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

Settings = dict[str, object]

SFT_STEPS = 150
RL_STEPS = 45
PROMPT_LENGTH, RESPONSE_LENGTH = 12, 12


def sft_settings(task: Path, output: Path, seed: int, steps: int = SFT_STEPS) -> Settings:
    """The supervised warm-up: short on purpose, so that RL has something left to teach."""
    return warm_up_settings(task, output, seed, 128, PROMPT_LENGTH + RESPONSE_LENGTH, steps)


def warm_up_settings(task: Path, output: Path, seed: int, batch_size: int, max_length: int, steps: int) -> Settings:
    """Supervised training of the random model, whose last step is exported."""
    return {
        "data.train_files": task / "sft_train.parquet",
        "data.train_batch_size": batch_size,
        "data.max_length": max_length,
        "data.num_workers": 0,
        "model.path": task / "model",
        "model.enable_gradient_checkpointing": False,
        "engine.dtype": "float32",
        "optim.lr": 2e-3,
        "optim.lr_scheduler_type": "cosine",
        "optim.lr_warmup_steps": 20,
        "checkpoint.save_contents": "[model,hf_model]",
        "trainer.total_training_steps": steps,
        "trainer.save_freq": steps,
        **run_settings(output, seed),
    }


def rl_settings(algorithm: str, task: Path, model: Path, output: Path, seed: int, steps: int = RL_STEPS) -> Settings:
    """GRPO (group baseline) or PPO (a critic and GAE) from the model of the warm-up."""
    estimator = {"grpo": _grpo_settings, "ppo": _ppo_settings}[algorithm]
    return {
        **policy_settings(task, model, output, seed, steps),
        "data.max_prompt_length": PROMPT_LENGTH,
        "data.max_response_length": RESPONSE_LENGTH,
        "actor_rollout_ref.actor.optim.lr": 2e-4,
        "actor_rollout_ref.rollout.max_num_seqs": 1024,
        **estimator(model),
        "trainer.test_freq": 15,
    }


def megatron_settings(ranks: int) -> Settings:
    """The changes for megatron-core on Ray; ``ranks`` processes share each weight matrix and compute the same rows."""
    sections = ("actor_rollout_ref.actor", "critic")
    return {
        **{f"{section}.strategy": "megatron" for section in sections},
        **{f"{section}.megatron.dtype": "float32" for section in sections},
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": ranks,  # the critic follows it
        "trainer.controller": "ray",
        "trainer.n_gpus_per_node": ranks,
        "ray_kwargs.ray_init.num_cpus": max(2, ranks),
    }


def policy_settings(task: Path, model: Path, output: Path, seed: int, steps: int) -> Settings:
    """Reinforcement learning on one CPU, from the model of the warm-up: what every quickstart sets."""
    return {
        "data.train_files": task / "rl_train.parquet",
        "data.val_files": task / "rl_test.parquet",
        "data.dataloader_num_workers": 0,
        "data.seed": seed,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": True,
        "trainer.save_freq": steps,
        "trainer.validation_data_dir": output / "validation",
        **run_settings(output, seed),
    }


def _grpo_settings(model: Path) -> Settings:
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 128,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    }


def _ppo_settings(model: Path) -> Settings:
    return {
        "algorithm.adv_estimator": "gae",
        "data.train_batch_size": 1024,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "critic.model.path": model,
        "critic.model.enable_gradient_checkpointing": False,
        "critic.model.fsdp_config.dtype": "float32",
        "critic.optim.lr": 5e-4,
        "critic.checkpoint.save_contents": "[model]",
    }


def generation_settings(model: Path, prompts: Path, file: Path) -> Settings:
    """Responses of a model to the rows of a file, drawn from its whole distribution."""
    return {
        "model.path": model,
        "data.path": prompts,
        "data.output_path": file,
        "rollout.top_p": 1.0,
        "rollout.top_k": -1,
        "rollout.dtype": "float32",
        "trainer.controller": "local",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
    }


def run_settings(output: Path, seed: int) -> Settings:
    """One rank in this process, and where it writes."""
    return {
        "trainer.controller": "local",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.seed": seed,
        "trainer.logger": "[file]",
        "trainer.default_local_dir": output / "checkpoints",
        "trainer.project_name": "quickstart",
        "trainer.experiment_name": output.name,
        "trainer.resume_mode": "disable",
    }


def command(module: str, settings: Settings) -> list[str]:
    """The command line that runs ``module`` with these settings."""
    return [sys.executable, "-m", module, *(f"{key}={value}" for key, value in settings.items())]
