"""Settings of the quickstart of distillation: a teacher, a smaller student, and three ways to train it further."""

from __future__ import annotations

from pathlib import Path

from examples.quickstart.settings import (
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    SFT_STEPS,
    Settings,
    generation_settings,
    rl_settings,
    sft_settings,
)

STUDENT = {"hidden_size": 64, "layers": 4}
GRPO_STEPS = 20
"""Steps of GRPO of the student, whose compute the other two ways get."""
BATCH, MINI_BATCH, EPOCHS = 256, 64, 3
"""Responses of a step of on-policy distillation, of each of its optimizer steps, and how often each is learnt from: the
teacher's distributions at its tokens stay right when the student moves on."""
SAMPLES = 2
"""Responses of the teacher to each training prompt, for supervised training."""
SFT_BATCH = 128
ROWS_OF_GRPO = 1024
"""Responses of a step of GRPO, as in the first quickstart."""


def warm_up_settings(task: Path, model: Path, output: Path, seed: int) -> Settings:
    """The supervised warm-up of the student, as short as that of the teacher."""
    return sft_settings(task, output, seed, SFT_STEPS) | {"model.path": model}


def grpo_settings(task: Path, model: Path, output: Path, seed: int, steps: int = GRPO_STEPS) -> Settings:
    """GRPO of the student, with the settings by which the teacher was trained."""
    return rl_settings("grpo", task, model, output, seed, steps) | {"trainer.test_freq": steps}


def distillation_settings(task: Path, model: Path, teacher: Path, output: Path, seed: int, steps: int) -> Settings:
    """On-policy distillation: the teacher scores the student's own responses; rewards are not used."""
    return grpo_settings(task, model, output, seed, steps) | {
        "data.train_batch_size": BATCH,
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": MINI_BATCH,
        "actor_rollout_ref.actor.ppo_epochs": EPOCHS,
        # As in supervised training, so that neither has the better optimizer.
        "actor_rollout_ref.actor.optim.lr": 2e-3,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 2,
        "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "algorithm.adv_estimator": "reinforce_plus_plus",
        # Nothing reads the log-probs before the update, so no pass computes them.
        "algorithm.rollout_correction.bypass_mode": True,
        "distillation.enabled": True,
        "distillation.teacher_models.teacher_model.model_path": teacher,
        "distillation.distillation_loss.loss_mode": "forward_kl",
        "distillation.distillation_loss.use_task_rewards": False,
    }


def samples_settings(task: Path, teacher: Path, file: Path) -> Settings:
    """Responses of the teacher to the training prompts, drawn from its whole distribution."""
    return {
        **generation_settings(teacher, task / "rl_train.parquet", file),
        "data.n_samples": SAMPLES,
        "data.batch_size": 512,
        "rollout.prompt_length": PROMPT_LENGTH,
        "rollout.response_length": RESPONSE_LENGTH,
    }


def supervised_settings(task: Path, model: Path, file: Path, output: Path, seed: int, steps: int) -> Settings:
    """Supervised training of the student on the teacher's responses."""
    return sft_settings(task, output, seed, steps) | {
        "model.path": model,
        "data.train_files": file,
        "data.train_batch_size": SFT_BATCH,
    }


def validation_settings(task: Path, model: Path, output: Path, seed: int) -> Settings:
    """The held-out prompts alone, with greedy responses."""
    return grpo_settings(task, model, output, seed, 1) | {"trainer.val_only": True}


# ---- equal compute ------------------------------------------------------------------------------
# In passes of the student over one response: sampling and each pass without gradients cost 1, an update 3; a pass of
# the teacher costs as many times more as it has more weights.


def equal_steps(teacher_over_student: float) -> tuple[int, int]:
    """Steps of distillation and of supervised training that compute as much as GRPO does in its steps.

    GRPO samples, computes the log-probs before the update, and updates: 5 passes of each response. Distillation
    samples, has the teacher's pass, and updates ``EPOCHS`` times. Supervised training pays for the samples of the
    teacher, 8,000 prompts times ``SAMPLES``, and for updates alone.
    """
    budget = GRPO_STEPS * ROWS_OF_GRPO * 5
    distillation = budget / (BATCH * (1 + teacher_over_student + 3 * EPOCHS))
    supervised = (budget - 8000 * SAMPLES * teacher_over_student) / (SFT_BATCH * 3)
    return round(distillation), round(supervised)
