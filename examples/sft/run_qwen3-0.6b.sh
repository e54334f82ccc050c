#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-0.6B on conversations (a column `messages`), on the GPUs of one machine.
#     DATA=~/data/chats bash examples/sft/run_qwen3-0.6b.sh trainer.total_epochs=1
set -euo pipefail
data=${DATA:-$HOME/data/chats}

python3 -m verl.trainer.sft_trainer \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=128 \
    data.max_length=2048 \
    data.use_dynamic_bsz=true \
    data.max_token_len_per_gpu=8192 \
    data.truncation=right \
    model.path="${MODEL:-Qwen/Qwen3-0.6B}" \
    optim.lr=1e-5 \
    optim.lr_scheduler_type=cosine \
    optim.lr_warmup_steps_ratio=0.05 \
    trainer.n_gpus_per_node="${GPUS:-1}" \
    trainer.logger=[console,file] \
    trainer.project_name=sft \
    trainer.experiment_name=qwen3_0.6b \
    trainer.test_freq=100 \
    trainer.save_freq=500 \
    trainer.total_epochs=3 \
    "$@"
