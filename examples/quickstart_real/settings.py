"""Settings of the quickstart with a pretrained model: GRPO, samples of the model before, and training on these."""

from __future__ import annotations

from pathlib import Path

from examples.quickstart.settings import Settings, generation_settings, policy_settings, run_settings

PROMPTS, RESPONSES = 8, 8
"""Prompts of a step, and responses to each."""
STEPS = 12
PROMPT_LENGTH, RESPONSE_LENGTH = 64, 12
LEARNING_RATE, LORA_LEARNING_RATE = 1e-5, 2e-4
TOKENS_OF_A_PASS = 512
"""The head has 49,152 logits for each token, 0.2 MB in fp32: a pass of so many tokens takes some 1 GB."""
REWARD = Path(__file__).with_name("reward.py")


def grpo_settings(task: Path, model: Path, output: Path, seed: int, steps: int, is_lora: bool) -> Settings:
    """GRPO of the pretrained model, one optimizer step for each batch of samples."""
    return {
        **policy_settings(task, model, output, seed, steps),
        "algorithm.adv_estimator": "grpo",
        # One update of each batch, in fp32 like the sampling: its log-probs need no pass of their own.
        "algorithm.rollout_correction.bypass_mode": True,
        "custom_reward_function.path": REWARD,
        "data.max_prompt_length": PROMPT_LENGTH,
        "data.max_response_length": RESPONSE_LENGTH,
        "data.train_batch_size": PROMPTS,
        "actor_rollout_ref.rollout.n": RESPONSES,
        "actor_rollout_ref.rollout.max_num_seqs": PROMPTS * RESPONSES,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.use_prefix_grouper": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": TOKENS_OF_A_PASS,
        "actor_rollout_ref.actor.optim.lr": LORA_LEARNING_RATE if is_lora else LEARNING_RATE,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[hf_model]",
        **({"actor_rollout_ref.model.lora_rank": 16, "actor_rollout_ref.model.lora_alpha": 32} if is_lora else {}),
        "trainer.test_freq": max(1, steps // 3),
    }


def validation_settings(task: Path, model: Path, output: Path, seed: int) -> Settings:
    """The held-out prompts alone, with greedy responses."""
    return grpo_settings(task, model, output, seed, 1, is_lora=False) | {"trainer.val_only": True}


def samples_settings(prompts: Path, model: Path, file: Path, seed: int) -> Settings:
    """As many responses to each prompt as GRPO draws, from the model before training."""
    return {
        **generation_settings(model, prompts, file),
        "data.n_samples": RESPONSES,
        "data.batch_size": PROMPTS,
        "rollout.prompt_length": PROMPT_LENGTH,
        "rollout.response_length": RESPONSE_LENGTH,
        "rollout.seed": seed,
    }


def sft_settings(model: Path, file: Path, output: Path, seed: int, steps: int) -> Settings:
    """Supervised training on right answers, with as many optimizer steps of as many prompts as GRPO, at its rate."""
    return {
        "data.train_files": file,
        "data.train_batch_size": PROMPTS,
        "data.max_length": PROMPT_LENGTH + RESPONSE_LENGTH,
        "data.num_workers": 0,
        "model.path": model,
        "model.enable_gradient_checkpointing": False,
        "engine.dtype": "float32",
        "optim.lr": LEARNING_RATE,
        "checkpoint.save_contents": "[hf_model]",
        "trainer.total_training_steps": steps,
        "trainer.save_freq": steps,
        **run_settings(output, seed),
    }
