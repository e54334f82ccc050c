#!/usr/bin/env bash
# GRPO of LoRA adapters of Qwen3-8B on GSM8K, on one machine with 8 GPUs of 80 GB; your settings come last and win.
#     python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#     bash examples/grpo_trainer/run_qwen3-8b_lora.sh trainer.total_epochs=1
set -euo pipefail
source "$(dirname "$0")/../gsm8k/settings.sh"

python3 -m verl.trainer.main_ppo "${gsm8k[@]}" "${qwen3_8b[@]}" \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.fsdp_config.model_dtype=bf16 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=false \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.experiment_name=grpo_qwen3_8b_lora \
    trainer.max_actor_ckpt_to_keep=2 \
    "$@"
