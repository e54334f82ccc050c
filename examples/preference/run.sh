#!/usr/bin/env bash
# A reward model from preferences, RL on its scores, and DPO on the same preferences: a minute or two on a CPU.
#     bash examples/preference/run.sh [folder]
set -euo pipefail
out=${1:-outputs/preference}
python=${PYTHON:-python3}
one_process="trainer.controller=local trainer.device=cpu trainer.n_gpus_per_node=1 trainer.logger=[console]"
pairs="data.train_files=$out/pairs_train.parquet data.val_files=$out/pairs_val.parquet data.train_batch_size=32
    data.max_length=32 data.max_token_len_per_gpu=1024 data.num_workers=0 engine.dtype=float32
    trainer.test_freq=32 trainer.save_freq=32 checkpoint.save_contents=[model,optimizer,extra,hf_model]"

$python examples/preference/make_task.py --output_dir "$out"

$python -m verl.trainer.rm_trainer $one_process $pairs \
    model.path="$out/model" optim.lr=1e-3 trainer.total_training_steps=64 \
    trainer.default_local_dir="$out/rm"

$python -m verl.trainer.main_ppo $one_process \
    algorithm.adv_estimator=grpo \
    data.train_files="$out/prompts.parquet" data.val_files="$out/prompts.parquet" \
    data.train_batch_size=16 data.max_prompt_length=16 data.max_response_length=8 data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$out/model" \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128 \
    actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.fsdp_config.dtype=float32 \
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.dtype=float32 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128 \
    reward_model.enable=true reward_model.model.path="$out/rm/global_step_64/huggingface" \
    reward_model.model.fsdp_config.dtype=float32 reward_model.micro_batch_size_per_gpu=128 \
    trainer.total_training_steps=20 trainer.val_before_train=false trainer.default_local_dir="$out/ppo"

$python -m verl.trainer.dpo_trainer $one_process $pairs \
    model.path="$out/model" optim.lr=1e-3 trainer.total_training_steps=64 \
    trainer.default_local_dir="$out/dpo"
