# Settings that the scripts for GSM8K share. A script sources this file and passes the arrays on; what it sets itself
# comes after them and wins.
data=${DATA:-$HOME/data/gsm8k}

gsm8k=(
    data.train_files="$data/train.parquet"
    data.val_files="$data/test.parquet"
    data.max_prompt_length=512
    data.filter_overlong_prompts=true
    actor_rollout_ref.actor.use_dynamic_bsz=true
    trainer.logger=[console,file]
    trainer.project_name=gsm8k
)

# Qwen3-8B on one machine with 8 GPUs of 80 GB.
qwen3_8b=(
    data.train_batch_size=512
    data.max_response_length=1024
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-8B}"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
    actor_rollout_ref.ref.fsdp_config.param_offload=true
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    trainer.n_gpus_per_node="${GPUS:-8}"
    trainer.test_freq=5
    trainer.save_freq=20
    trainer.total_epochs=10
)
