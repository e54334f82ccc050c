"""The command line of a run in verl."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.scoreboard import rewards
from benchmarks.scoreboard.run import (
    BETAS,
    CLIP_HIGH,
    CLIP_LOW,
    CLIP_NEGATIVE,
    DPO_BETA,
    GRADIENT_NORM,
    WEIGHT_DECAY,
    Run,
)
from examples.quickstart.settings import Settings, command


def verl_command(run: Run) -> list[str]:
    """The command that trains."""
    settings = {"grpo": _grpo_settings, "sft": _sft_settings, "dpo": _dpo_settings}[run.method](run)
    module = {"grpo": "main_ppo", "sft": "sft_trainer", "dpo": "dpo_trainer"}[run.method]
    return command(f"verl.trainer.{module}", settings | _process_settings(run))


def _process_settings(run: Run) -> Settings:
    """One rank in this process."""
    return {
        "trainer.controller": "local",
        "trainer.device": "cuda" if torch.cuda.is_available() else "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.seed": run.seed,
        "trainer.logger": "[file]",
        "trainer.default_local_dir": f"{run.output}/checkpoints",
        "trainer.resume_mode": "disable",
        "trainer.total_training_steps": run.steps,
        "trainer.save_freq": run.steps,
        "trainer.test_freq": -1,
    }


def _optimizer_settings(run: Run, path: str) -> Settings:
    return {
        f"{path}.lr": run.learning_rate,
        f"{path}.lr_scheduler_type": "constant",
        f"{path}.weight_decay": WEIGHT_DECAY,
        f"{path}.betas": f"[{BETAS[0]},{BETAS[1]}]",
        f"{path}.clip_grad": GRADIENT_NORM,
    }


def _grpo_settings(run: Run) -> Settings:
    actor = "actor_rollout_ref.actor"
    return {
        "algorithm.adv_estimator": "grpo",
        # One update of each batch, in fp32 like the sampling: its log-probs need no pass of their own.
        "algorithm.rollout_correction.bypass_mode": run.updates == 1,
        "custom_reward_function.path": rewards.__file__,
        "data.train_files": run.rows,
        "data.val_files": run.validation,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.train_batch_size": run.batch_size,
        "data.max_prompt_length": run.prompt_length,
        "data.max_response_length": run.response_length,
        "actor_rollout_ref.model.path": run.model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        **_optimizer_settings(run, f"{actor}.optim"),
        f"{actor}.fsdp_config.dtype": "float32",
        f"{actor}.ppo_mini_batch_size": run.batch_size // run.updates,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": run.micro_batch_tokens,
        f"{actor}.clip_ratio_low": CLIP_LOW,
        f"{actor}.clip_ratio_high": CLIP_HIGH,
        f"{actor}.clip_ratio_c": CLIP_NEGATIVE,
        f"{actor}.checkpoint.save_contents": "[hf_model]",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": run.responses,
        "actor_rollout_ref.rollout.max_num_seqs": run.batch_size * run.responses,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "trainer.val_before_train": False,
    }


def _supervised_settings(run: Run) -> Settings:
    return {
        "data.train_files": run.rows,
        "data.shuffle": False,
        "data.num_workers": 0,
        "data.train_batch_size": run.batch_size,
        "data.max_length": run.prompt_length + run.response_length,
        "model.path": run.model,
        "model.enable_gradient_checkpointing": False,
        "engine.dtype": "float32",
        **_optimizer_settings(run, "optim"),
        "checkpoint.save_contents": "[hf_model]",
    }


def _sft_settings(run: Run) -> Settings:
    return _supervised_settings(run)


def _dpo_settings(run: Run) -> Settings:
    return _supervised_settings(run) | {"loss.beta": DPO_BETA, "data.max_token_len_per_gpu": run.micro_batch_tokens}


def exported_model(run: Run) -> Path:
    """The folder that a finished run wrote."""
    (folder,) = Path(run.output, "checkpoints").glob("**/huggingface")
    return folder
