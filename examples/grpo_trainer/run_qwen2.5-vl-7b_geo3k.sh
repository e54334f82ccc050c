#!/usr/bin/env bash
# GRPO of Qwen2.5-VL-7B on Geometry3K, on one machine with 8 GPUs of 80 GB; your settings come last and win.
#     python examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
#     bash examples/grpo_trainer/run_qwen2.5-vl-7b_geo3k.sh trainer.total_epochs=1
set -euo pipefail
data=${DATA:-$HOME/data/geo3k}

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.freeze_vision_tower=true \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.ref.fsdp_config.param_offload=true \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.logger=[console,file] \
    trainer.project_name=geo3k \
    trainer.experiment_name=grpo_qwen2.5_vl_7b \
    trainer.test_freq=5 \
    trainer.save_freq=20 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.total_epochs=15 \
    "$@"
