#!/usr/bin/env bash
# PPO with a critic: Qwen3-8B on GSM8K, on one machine with 8 GPUs of 80 GB; your settings come last and win.
#     python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#     bash examples/ppo_trainer/run_qwen3-8b.sh trainer.total_epochs=1
set -euo pipefail
source "$(dirname "$0")/../gsm8k/settings.sh"

python3 -m verl.trainer.main_ppo "${gsm8k[@]}" "${qwen3_8b[@]}" \
    algorithm.adv_estimator=gae \
    algorithm.lam=0.95 \
    algorithm.use_kl_in_reward=true \
    algorithm.kl_ctrl.kl_coef=0.001 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    critic.model.path="${MODEL:-Qwen/Qwen3-8B}" \
    critic.model.use_remove_padding=true \
    critic.optim.lr=1e-5 \
    critic.optim.lr_warmup_steps_ratio=0.05 \
    critic.model.fsdp_config.param_offload=true \
    critic.model.fsdp_config.optimizer_offload=true \
    trainer.critic_warmup=5 \
    trainer.experiment_name=ppo_qwen3_8b \
    "$@"
