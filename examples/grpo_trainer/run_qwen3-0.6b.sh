#!/usr/bin/env bash
# GRPO of Qwen3-0.6B on GSM8K with verl's own rollout engine, on one GPU of 24 GB; your settings come last and win.
#     python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#     bash examples/grpo_trainer/run_qwen3-0.6b.sh trainer.total_training_steps=20
set -euo pipefail
source "$(dirname "$0")/../gsm8k/settings.sh"

python3 -m verl.trainer.main_ppo "${gsm8k[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=64 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-0.6B}" \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.rollout.n=8 \
    trainer.n_gpus_per_node="${GPUS:-1}" \
    trainer.experiment_name=grpo_qwen3_0.6b \
    trainer.test_freq=10 \
    trainer.save_freq=50 \
    trainer.total_epochs=5 \
    "$@"
