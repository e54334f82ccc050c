"""Command lines in the style of published run scripts: they compose unchanged, and run or are refused with reasons.

Only what belongs to a machine differs: files, number of ranks, and the trackers that are installed.
"""

from __future__ import annotations

import sys

import pytest

from tests.trainer.config.support import Run
from verl.errors import ConfigError
from verl.trainer.config import SFTConfig

GRPO = r"""
    algorithm.adv_estimator=grpo \
    data.train_files=$RUN/train.jsonl \
    data.val_files=$RUN/val.jsonl \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    data.return_raw_chat=True \
    +data.apply_chat_template_kwargs.enable_thinking=False \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    +actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
    actor_rollout_ref.actor.optim.warmup_style=cosine \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    +actor_rollout_ref.actor.fsdp_config.grad_offload=False \
    actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=ENGINE \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.enforce_eager=False \
    actor_rollout_ref.rollout.free_cache_engine=True \
    actor_rollout_ref.rollout.load_format=safetensors \
    actor_rollout_ref.rollout.layered_summon=True \
    actor_rollout_ref.rollout.max_num_batched_tokens=16384 \
    actor_rollout_ref.rollout.enable_chunked_prefill=False \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.95 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.logger='["console"]' \
    trainer.project_name='grpo_example_gsm8k' \
    trainer.experiment_name='qwen3_8b_function_rm' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=5 \
    +trainer.val_before_train=False \
    trainer.val_generations_to_log_to_wandb=10 \
    trainer.total_epochs=15
"""

PPO = r"""
    algorithm.adv_estimator=gae \
    algorithm.gamma=1.0 \
    algorithm.lam=0.95 \
    data.train_files="['$RUN/train.jsonl', '$RUN/train.jsonl']" \
    data.val_files="['$RUN/val.jsonl']" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.return_raw_chat=True \
    data.shuffle=True \
    data.seed=42 \
    actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.shuffle=False \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 \
    actor_rollout_ref.actor.checkpoint.contents="['model','optimizer','extra','hf_model']" \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \
    +actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=LlamaDecoderLayer \
    actor_rollout_ref.rollout.name=ENGINE \
    actor_rollout_ref.rollout.mode=sync \
    actor_rollout_ref.rollout.temperature=0.9 \
    actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.top_p=0.9 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    critic.strategy=fsdp2 \
    critic.optim.lr=1e-5 \
    critic.optim.lr_warmup_steps_ratio=0.015 \
    critic.model.path=deepseek-ai/deepseek-llm-7b-chat \
    critic.model.use_remove_padding=True \
    critic.model.enable_gradient_checkpointing=True \
    critic.model.fsdp_config.param_offload=False \
    critic.ppo_max_token_len_per_gpu=98304 \
    critic.forward_max_token_len_per_gpu=98304 \
    critic.cliprange_value=0.2 \
    reward_model.enable=True \
    reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 \
    reward_model.model.input_tokenizer=null \
    reward_model.model.use_remove_padding=True \
    reward_model.model.fsdp_config.param_offload=True \
    reward_model.micro_batch_size_per_gpu=32 \
    reward_model.use_dynamic_bsz=True \
    reward_model.forward_max_token_len_per_gpu=98304 \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_penalty=kl \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.kl_ctrl.type=adaptive \
    algorithm.kl_ctrl.kl_coef=0.001 \
    algorithm.kl_ctrl.target_kl=0.05 \
    trainer.critic_warmup=10 \
    trainer.logger=['console'] \
    trainer.project_name=verl_example \
    trainer.experiment_name=deepseek_llm_7b_model_rm \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=2 \
    trainer.balance_batch=True \
    trainer.resume_mode=disable \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.max_critic_ckpt_to_keep=2 \
    trainer.default_hdfs_dir=null \
    trainer.default_local_dir=$RUN/checkpoints \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_training_steps=200 \
    ray_init.num_cpus=64
"""

GEO3K = r"""
    algorithm.adv_estimator=grpo \
    data.train_files=$RUN/train.jsonl \
    data.val_files=$RUN/val.jsonl \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    data.image_key=images \
    data.return_multi_modal_inputs=True \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \
    actor_rollout_ref.actor.freeze_vision_tower=True \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=ENGINE \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.enable_chunked_prefill=False \
    actor_rollout_ref.rollout.enforce_eager=False \
    actor_rollout_ref.rollout.free_cache_engine=True \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=20 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.logger='["console"]' \
    trainer.project_name='verl_grpo_example_geo3k' \
    trainer.experiment_name='qwen2_5_vl_7b_function_rm' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15
"""

LORA = r"""
    algorithm.adv_estimator=grpo \
    data.train_files=$RUN/train.jsonl \
    data.val_files=$RUN/val.jsonl \
    data.train_batch_size=16 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    data.shuffle=False \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.model.use_shm=True \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.model.exclude_modules='.*visual.*' \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=ENGINE \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.max_num_seqs=512 \
    actor_rollout_ref.rollout.max_model_len=1536 \
    actor_rollout_ref.rollout.max_num_batched_tokens=1536 \
    actor_rollout_ref.rollout.enable_chunked_prefill=False \
    actor_rollout_ref.rollout.load_format=safetensors \
    actor_rollout_ref.rollout.layered_summon=True \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.kl_ctrl.kl_coef=0.001 \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.logger='["console"]' \
    trainer.project_name='verl_grpo_example_gsm8k' \
    trainer.experiment_name='qwen2.5_3b_grpo_lora' \
    trainer.n_gpus_per_node=2 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15
"""

SFT = r"""
    data.train_files=$RUN/train.jsonl \
    data.val_files=$RUN/val.jsonl \
    data.train_batch_size=64 \
    data.prompt_key=extra_info \
    data.response_key=extra_info \
    data.prompt_dict_keys=['question'] \
    +data.response_dict_keys=['answer'] \
    data.micro_batch_size_per_gpu=4 \
    data.use_dynamic_bsz=False \
    data.max_length=2048 \
    data.truncation=right \
    data.balance_dp_token=True \
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \
    model.enable_gradient_checkpointing=True \
    model.trust_remote_code=False \
    model.lora_rank=0 \
    model.target_modules=all-linear \
    model.strategy=fsdp2 \
    model.fsdp_config.model_dtype=fp32 \
    model.fsdp_config.cpu_offload=False \
    model.fsdp_config.wrap_policy.min_num_params=0 \
    +model.override_config.attn_implementation=sdpa \
    use_remove_padding=true \
    ulysses_sequence_parallel_size=1 \
    optim.lr=1e-4 \
    optim.betas="[0.9,0.95]" \
    optim.weight_decay=0.01 \
    optim.lr_warmup_steps_ratio=0.1 \
    optim.clip_grad=1.0 \
    optim.lr_scheduler=cosine \
    checkpoint.save_contents=["model","optimizer","extra"] \
    trainer.default_local_dir=$RUN/checkpoints \
    trainer.project_name=gsm8k-sft \
    trainer.experiment_name=gsm8k-sft-qwen-2.5-0.5b-instruct \
    trainer.logger=console \
    trainer.total_epochs=1 \
    trainer.save_freq=100 \
    trainer.test_freq=100 \
    trainer.default_hdfs_dir=null \
    trainer.n_gpus_per_node=4 \
    trainer.nnodes=1 \
    trainer.seed=1
"""


# What scripts of the releases set beside the settings of GRPO, each as a line of differences.
RELEASES = {
    "dynamic batches": """actor_rollout_ref.actor.use_dynamic_bsz=True trainer.balance_batch=True
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4096""",
    "dapo": """reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True
        +reward.reward_kwargs.overlong_buffer_cfg.len=512 +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
        +reward.reward_kwargs.overlong_buffer_cfg.log=False +reward.reward_kwargs.max_resp_len=1024
        actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
        actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean""",
    "gspo": """actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.clip_ratio_low=3e-4
        actor_rollout_ref.actor.clip_ratio_high=4e-4 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean""",
    "sapo": """actor_rollout_ref.actor.policy_loss.loss_mode=sapo +actor_rollout_ref.actor.policy_loss.tau_pos=1.0
        +actor_rollout_ref.actor.policy_loss.tau_neg=1.05""",
    "rloo": "algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl",
    "reinforce++": "algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=1.0",
    "gdpo": """algorithm.adv_estimator=gdpo reward.reward_manager.name=gdpo
        +algorithm.gdpo_reward_keys='["accuracy_reward","format_reward"]'""",
    "rollout correction": """algorithm.rollout_correction.rollout_is=token
        algorithm.rollout_correction.rollout_is_threshold=2.0 algorithm.rollout_correction.bypass_mode=true
        algorithm.rollout_correction.loss_type=reinforce
        algorithm.rollout_correction.rollout_is_batch_normalize=true""",
    "profiler of another device": """global_profiler.tool=npu global_profiler.steps=[2,4]
        global_profiler.save_path=$RUN/profile actor_rollout_ref.actor.profiler.enable=True
        actor_rollout_ref.actor.profiler.all_ranks=True actor_rollout_ref.actor.profiler.tool_config.npu.level=level0
        actor_rollout_ref.actor.profiler.tool_config.npu.contents=[npu,cpu]
        actor_rollout_ref.rollout.profiler.enable=True
        actor_rollout_ref.rollout.profiler.ranks=[0]""",
    "offload": """actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.offload_policy=True actor_rollout_ref.actor.entropy_checkpointing=True
        actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4
        actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=4 actor_rollout_ref.rollout.ignore_eos=False
        actor_rollout_ref.actor.entropy_from_logits_with_chunking=True
        actor_rollout_ref.actor.checkpoint.strict=False""",
    "an environment of uv": """trainer.use_v1=True transfer_queue.enable=False trainer.v1.trainer_mode=sync
        ++ray_kwargs.ray_init.runtime_env.py_executable='uv -v run --frozen --all-packages --extra fsdp'""",
    "a critic": """algorithm.adv_estimator=gae critic.optim.lr=1e-5 critic.model.path=org/name
        critic.fsdp.param_offload=True critic.fsdp.optimizer_offload=True critic.ppo_micro_batch_size_per_gpu=4""",
    "prompts shared": """actor_rollout_ref.actor.use_prefix_grouper=True
        actor_rollout_ref.model.use_remove_padding=False
        actor_rollout_ref.rollout.val_kwargs.do_sample=False actor_rollout_ref.rollout.val_kwargs.n=30""",
}
MEGATRON = r"""
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.use_mbridge=True
    actor_rollout_ref.actor.megatron.vanilla_mbridge=False
    actor_rollout_ref.actor.megatron.use_remove_padding=False
    +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=alltoall
    +actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1
    +actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
"""


def without(script: str, *keys: str) -> str:
    """A script without the lines of these keys, which differences set again."""
    return "\n".join(line for line in script.splitlines() if not any(f"{key}=" in line for key in keys))


@pytest.mark.parametrize("name", RELEASES)
def test_scripts_of_the_releases(run: Run, name: str):
    differences = " ".join(RELEASES[name].split())
    keys = [setting.partition("=")[0].lstrip("+") for setting in differences.split() if "=" in setting]
    run.script(f"{without(with_our_engine(GRPO), *keys).rstrip()} {differences}")


@pytest.mark.parametrize("engine", ["model_engine=megatron", "actor_rollout_ref.actor.strategy=megatron"])
def test_scripts_with_megatron(run: Run, engine: str):
    more = " ".join(f"{MEGATRON} {engine}".split())
    config = run.script(f"{without(with_our_engine(GRPO), 'fsdp_config.model_dtype').rstrip()} {more}")
    actor = config.actor_rollout_ref.actor
    assert actor.placement is actor.megatron
    assert (actor.shared_by, actor.optim.override_optimizer_config) == (4, None)
    assert set(actor.megatron.override_transformer_config) == {
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "moe_permute_fusion"),
        *("moe_router_dtype", "moe_token_dispatcher_type", "gradient_accumulation_fusion"),
    }


def test_a_supervised_script_of_the_releases(run: Run):
    config = run.script(
        """engine=megatron optim=megatron model=hf_model data.train_files=$RUN/train.jsonl data.train_batch_size=96
        data.messages_key=messages data.pad_mode=no_padding data.use_dynamic_bsz=True data.max_token_len_per_gpu=8192
        model.path=Qwen/Qwen3-0.6B model.use_remove_padding=True engine.tensor_model_parallel_size=2
        engine.pipeline_model_parallel_size=1 engine.use_mbridge=True engine.vanilla_mbridge=True
        engine.override_transformer_config.attention_backend=auto optim.lr=2e-5 optim.min_lr=2e-6
        optim.lr_warmup_steps=10 optim.lr_decay_style=cosine optim.lr_warmup_init=0 optim.weight_decay=0.1
        optim.betas=[0.9,0.95] optim.clip_grad=1.0 trainer.logger=console trainer.n_gpus_per_node=8
        trainer.save_freq=-1 trainer.resume_mode=disable trainer.seed=1111""",
        SFTConfig,
        "sft_trainer_engine",
    )
    assert (config.placement is config.megatron, config.megatron.tensor_model_parallel_size) == (True, 2)
    assert config.optim.min_lr_ratio == pytest.approx(0.1)


@pytest.mark.parametrize("script", [GRPO, PPO, GEO3K, LORA, SFT])
def test_the_scripts_are_long(script: str):
    assert script.count("=") >= 40


def with_our_engine(script: str) -> str:
    """The script with an engine that needs no other program; it is not split over ranks."""
    return script.replace("tensor_model_parallel_size=2", "tensor_model_parallel_size=1").replace("ENGINE", "hf")


def test_grpo(run: Run):
    config = run.script(with_our_engine(GRPO))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert actor.optim.lr_scheduler_type == "cosine"
    assert actor.fsdp_config.model_dtype == "bfloat16"
    assert rollout.engine_kwargs["vllm"] == {"disable_mm_preprocessor_cache": True}
    assert (rollout.n, rollout.val_kwargs.n, rollout.val_kwargs.temperature) == (5, 4, 0.6)
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.trainer.log_val_generations == 10
    assert config.trainer.val_before_train is False
    assert config.trainer.default_local_dir == "checkpoints/grpo_example_gsm8k/qwen3_8b_function_rm"


def test_ppo(run: Run):
    config = run.script(with_our_engine(PPO))
    assert config.data.train_files == (f"{run.folder}/train.jsonl",) * 2
    actor, critic = config.actor_rollout_ref.actor, config.critic
    assert actor.fsdp_config.strategy == critic.model.fsdp_config.strategy == "fsdp2"
    assert actor.checkpoint.load_contents == ("model", "optimizer", "extra", "hf_model")
    assert actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap == ("LlamaDecoderLayer",)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert critic.use_dynamic_bsz is True  # follows the actor
    assert critic.ppo_mini_batch_size == 256
    assert config.reward_model.model.input_tokenizer is None
    assert config.ray_kwargs.ray_init["num_cpus"] == 64


def test_images(run: Run):
    config = run.script(with_our_engine(GEO3K))
    assert (config.data.image_key, config.data.max_prompt_length) == ("images", 1024)
    assert config.actor_rollout_ref.actor.freeze_vision_tower is True
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert (config.actor_rollout_ref.actor.kl_loss_coef, config.actor_rollout_ref.rollout.n) == (0.01, 5)


def test_lora(run: Run):
    config = run.script(with_our_engine(LORA))
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (64, 32, "all-linear")
    assert model.exclude_modules == ".*visual.*"
    assert model.use_shm is True
    assert (rollout.max_model_len, rollout.max_num_batched_tokens) == (1536, 1536)


def test_sft(run: Run):
    config = run.script(SFT, SFTConfig, "sft_trainer")
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config.engine.strategy == "fsdp2"
    assert (config.data.prompt_dict_keys, config.data.response_dict_keys) == (("question",), ("answer",))
    assert config.optim.betas == (0.9, 0.95)
    assert config.optim.lr_scheduler_type == "cosine"


@pytest.mark.parametrize("script", [GRPO, PPO, GEO3K, LORA])
def test_only_an_engine_that_is_not_built_is_refused(run: Run, script: str):
    with pytest.raises(ConfigError) as caught:
        run.script(script.replace("ENGINE", "trtllm"))
    assert str(caught.value).startswith("1 problem in the configuration")
    assert "actor_rollout_ref.rollout.name=trtllm: this engine is not in this version" in str(caught.value)


@pytest.mark.parametrize("script", [GRPO, PPO, GEO3K, LORA])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_runs_from_another_environment(run: Run, script: str, engine: str):
    python = f" +actor_rollout_ref.rollout.engine_kwargs.{engine}.python={sys.executable}"
    assert run.script(script.replace("ENGINE", engine) + python).actor_rollout_ref.rollout.name == engine


def test_everything_that_a_script_lacks_here_is_told_at_once(run: Run):
    lacking = """ critic.model.mtp.enable=True
        actor_rollout_ref.rollout.elastic=true actor_rollout_ref.actor.router_replay.record_file=x """
    with pytest.raises(ConfigError) as caught:
        run.script(GRPO.replace("ENGINE", "vllm") + lacking)
    assert str(caught.value).startswith("3 problems in the configuration")
