"""Keys of the releases v0.8.0, v0.9.0, v0.9.1 and 0.10 of verl that the YAML files here do not contain.

``ALIASES`` maps spellings of the releases to keys. ``RETIRED`` lists keys that nothing here reads: the default of the
releases is ignored, another value is logged (``_logged``) or, where it would change what a run computes, refused
(``_refused``). The first pattern that matches a key decides.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl.config.inactive import NO_QUEUE
from verl.config.megatron_flags import IDLE
from verl.config.model import OTHER_ENGINES
from verl.trainer.config import megatron_lora
from verl.trainer.config.key_table import Alias, Retired

OPTIMIZERS = ("actor_rollout_ref.actor.optim", "critic.optim", "optim")
NAMES_OF_OPTIMIZERS = {"adam": "AdamW", "sgd": "SGD", "muon": "Muon", "dist_muon": "Muon"}
"""megatron-core's names, whose `adam` has decoupled weight decay, and the classes of ``torch.optim``."""
SETTINGS_OF_MUON = {"muon_momentum": "momentum", "muon_nesterov": "nesterov", "muon_num_ns_steps": "ns_steps"}
"""Keys of the releases, and the keyword arguments of ``torch.optim.Muon``."""
_FSDP = (
    *("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config"),
    *("critic.model.fsdp_config", "reward_model.model.fsdp_config", "engine"),
)
MEGATRON_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("use_distributed_optimizer", "use_dist_checkpointing", "dist_checkpointing_path", "dist_checkpointing_prefix"),
    *("override_ddp_config", "override_transformer_config", "override_mcore_model_config", "use_mbridge"),
    *("vanilla_mbridge", "grad_offload"),
)
"""Keys of ``McoreEngineConfig`` that the supervised trainers of the releases have in ``engine``."""

SECTIONS_OF_VEOMNI = {
    "actor_rollout_ref.actor": "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.ref": "actor_rollout_ref.ref.fsdp_config",
    "critic": "critic.model.fsdp_config",
}
"""Sections whose section ``veomni`` is read with ``strategy=veomni``, and FSDP's settings beside each."""
SETTINGS_OF_VEOMNI: dict[str, tuple[str, object]] = {
    "param_offload": ("param_offload", False),
    "optimizer_offload": ("optimizer_offload", False),
    "enable_fsdp_offload": ("offload_policy", False),
    "enable_full_shard": ("reshard_after_forward", True),
    "fsdp_size": ("fsdp_size", -1),
    "ulysses_parallel_size": ("ulysses_sequence_parallel_size", 1),
    "forward_prefetch": ("forward_prefetch", False),
    "moe_implementation": ("moe_implementation", None),
    "seed": ("seed", 42),
    "full_determinism": ("full_determinism", False),
}
"""Settings of a section ``veomni``: FSDP's of the same meaning, and the default, which says nothing."""

TARGETS_ELSEWHERE = {"critic.model": ("verl.workers.config.HFModelConfig",)}
"""Section → classes that the releases name in its ``_target_``, and that are no class of this section here."""

_SKIP = "actor_rollout_ref.rollout.skip"
_SERVER = "data.n_samples"  # a key that only generation has

ALIASES: tuple[Alias, ...] = (
    Alias("actor_rollout_ref.actor.model_engine", "model_engine"),
    Alias("critic.fsdp", "critic.model.fsdp_config"),
    Alias("sandbox_fusion", "reward_model.sandbox_fusion"),
    Alias("actor_rollout_ref.actor.policy_loss.tau_pos", "actor_rollout_ref.actor.tau_pos"),
    Alias("actor_rollout_ref.actor.policy_loss.tau_neg", "actor_rollout_ref.actor.tau_neg"),
    *(
        Alias(f"actor_rollout_ref.actor.{engine}.router_replay.mode", "actor_rollout_ref.actor.router_replay.mode")
        for engine in ("megatron", "veomni")
    ),
    Alias("actor_rollout_ref.model.override_config.model_config", "actor_rollout_ref.model.override_config"),
    *(Alias(f"{fsdp}.min_num_params", f"{fsdp}.wrap_policy.min_num_params") for fsdp in _FSDP),
    *(
        Alias(f"{section}.{name}", f"{_SKIP}_{new}", silent=silent)
        for section in (_SKIP, "skip.rollout", "skip.rollout_tq", "skip.async_rollout")
        for name, new, silent in (("enable", "rollout", False), ("dump_dir", "dump_dir", "~/.verl/rollout_dump"))
    ),
    *(Alias(f"{model}.lora.adapter_path", f"{model}.lora_adapter_path") for model in megatron_lora.SECTIONS),
    Alias("actor_rollout_ref.model.lora.merge", "actor_rollout_ref.rollout.merge_adapters", silent=False),
    *(Alias(f"{optim}.lr_decay_steps", f"{optim}.total_training_steps") for optim in OPTIMIZERS),
    # the supervised trainers
    Alias("trainer.balance_batch", "data.balance_dp_token", silent=True),
    *(Alias(f"engine.{name}", f"megatron.{name}") for name in MEGATRON_SIZES),
    *(
        Alias(f"engine.{name}", f"engine.{SETTINGS_OF_VEOMNI[name][0]}", silent=SETTINGS_OF_VEOMNI[name][1])
        for name in ("enable_fsdp_offload", "enable_full_shard", "ulysses_parallel_size")
    ),
    # the server's generation
    Alias("data.train_files", "data.path", only_with=_SERVER),
    Alias("actor_rollout_ref.rollout.n", _SERVER, only_with=_SERVER),
    Alias("actor_rollout_ref.model", "model", only_with=_SERVER),
    Alias("actor_rollout_ref.rollout", "rollout", only_with=_SERVER),
)


def _logged(reason: str, keys: Mapping[str, object]) -> tuple[Retired, ...]:
    return tuple(Retired(pattern, reason, (None, default), refused=False) for pattern, default in keys.items())


def _refused(reason: str, keys: Mapping[str, object]) -> tuple[Retired, ...]:
    return tuple(Retired(pattern, reason, (None, default)) for pattern, default in keys.items())


def _absent(what: str, section: str, switch: str, is_default: object = False) -> tuple[Retired, ...]:
    """A feature that is not in this version: its switch is refused, its other settings are logged."""
    return (
        *_refused(f"{what} is not in this version; leave it out", {f"{section}.{switch}": is_default}),
        Retired(section, f"part of {what}, which is not in this version", (), refused=False, part=True),
    )


_FUSED = "log-probs and entropy always come from hidden states in slices, never from all logits at once"
_UNPADDED = "no graph of fixed sizes is compiled, so nothing is padded"
_OTHER_TOOLS = "part of profilers that are not in this version"
_REQUESTS = "the reward function says it in its request"

_SIDES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
_MODELS = ("actor_rollout_ref.actor", "critic")
_SIZE_OF_LOGITS = "entropy_from_logits_chunk_size pad_to_length"
_ALL_MEGATRON = (*(f"{side}.megatron" for side in _SIDES), "critic.megatron")
_OVERRIDES = "override_transformer_config"

PROGRAM_KEYS: tuple[tuple[tuple[str, ...], str], ...] = (
    (_SIDES, _SIZE_OF_LOGITS),
    (tuple(f"{side}.fsdp_config" for side in _SIDES), f"{_SIZE_OF_LOGITS} pad_to_length_bucket"),
    (("critic.fsdp",), f"{_SIZE_OF_LOGITS} pad_to_length_bucket entropy_from_logits_with_chunking"),
    (("critic.fsdp",), "entropy_checkpointing use_orig_params use_torch_compile"),
    (tuple(f"{model}.checkpoint" for model in _MODELS), "mbridge_config"),
    (("actor_rollout_ref.actor.checkpoint",), "strict"),
    (
        tuple(f"{model}.optim" for model in _MODELS),
        "zero_indexed_step lr_decay_steps lr_decay_style lr_warmup_init min_lr lr_wsd_decay_steps lr_wsd_decay_style "
        "weight_decay_incr_style main_grads_dtype use_precision_aware_optimizer use_checkpoint_opt_param_scheduler "
        "use_layer_wise_distributed_optimizer muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec "
        "muon_match_adamw_update_rms muon_momentum muon_nesterov muon_num_ns_steps muon_scalar_optimizer "
        "muon_scale_mode muon_split_qkv muon_tp_mode",
    ),
    (
        _ALL_MEGATRON,
        f"{_SIZE_OF_LOGITS} pad_to_length_bucket entropy_from_logits_with_chunking pad_bshd_to_minibatch_max "
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient dynamic_context_parallel "
        "max_seqlen_per_dp_cp_rank use_megatron_fsdp use_remove_padding router_replay.mode router_replay.record_file "
        "router_replay.replay_file",
    ),
    (
        (f"actor_rollout_ref.actor.megatron.{_OVERRIDES}", f"critic.megatron.{_OVERRIDES}"),
        "attention_backend recompute_granularity recompute_method recompute_modules recompute_num_layers",
    ),
    (
        ("actor_rollout_ref.model.lora", "critic.model.lora"),
        "rank alpha type adapter_path target_modules exclude_modules merge dropout dropout_position dtype "
        "lora_A_init_method lora_B_init_method a2a_experimental freeze_language_model freeze_vision_model "
        "freeze_vision_projection",
    ),
    (
        ("actor_rollout_ref.rollout",),
        "full_determinism moe_load_balance_metrics_interval trace.project_name trace.experiment_name skip.enable "
        "skip.dump_dir skip.action skip.max_dump_step",
    ),
    (("algorithm.filter_groups",), "max_inflight_gen_batches"),
    (("critic",), "loss_scale_factor nccl_timeout"),
    (("critic.model",), "custom_chat_template hf_config_path use_fused_kernels fused_kernel_options.impl_backend"),
    (("data",), "audio_key mm_processor_kwargs"),
    (("ray_kwargs.ray_init.runtime_env",), "py_executable"),
    (("reward.reward_manager.module",), "name"),
    (
        ("reward.reward_model.rollout",),
        "do_sample full_determinism ignore_eos layered_summon limit_images load_format mtp multi_stage_wake_up n "
        "pipeline_model_parallel_size quantization_config_file scheduling_policy seed skip_tokenizer_init temperature "
        "top_k top_p",
    ),
    (tuple(f"skip.{name}" for name in ("rollout", "rollout_tq", "async_rollout")), "action steps"),
    (("trainer",), "use_v1"),
)
"""Sections, and keys in their YAML files in the releases that those here lack; see ``other_spellings``."""

RETIRED: tuple[Retired, ...] = (
    *_absent("training of quantized weights", "*.qat", "enable"),
    *_absent("prefill and decoding on separate machines", "*.disaggregation", "enabled"),
    *_absent("tokens that go on from turn to turn without being rendered again", "data.continuous_token", "enable"),
    *_refused("a value model predicts no tokens, so it has no heads; leave it out", {"critic.model.mtp.enable": False}),
    Retired("critic.model.mtp", "a value model has no heads of multi-token prediction", (), refused=False, part=True),
    *_logged("it divides work alike", {"*model.lora.a2a_experimental": False}),
    *_logged(
        "how ranks of an engine share experts changes no result; expert_parallel_size says it",
        {"actor_rollout_ref.rollout.moe_tensor_parallel_size": 1},
    ),
    *_refused(
        "log-probs must not be random, so adapters have no dropout; leave it at 0",
        {"*model.lora.dropout": 0.0, "*model.lora.dropout_position": "pre"},
    ),
    *_refused(
        "adapters have the dtype of the model, and the optimizer fp32; leave it out", {"*model.lora.dtype": None}
    ),
    *_refused("B begins at 0, so that a new adapter changes nothing", {"*model.lora.lora_B_init_method": "zero"}),
    *_refused(
        "adapters are for the language model, whose own weights stay as they are; leave it true",
        {f"*model.lora.freeze_{part}": True for part in ("language_model", "vision_model", "vision_projection")},
    ),
    Retired(
        "*model.lora.type",
        "of the kinds of LoRA there are lora and, with lora.use_dora under FSDP, DoRA; leave it out",
        (None, "lora", "canonical_lora"),
    ),
    Retired(
        "*model.lora.lora_A_init_method",
        "A is drawn as peft draws it (Kaiming, uniform)",
        (None, "kaiming"),
        refused=False,
        part=True,
    ),
    Retired("*model.lora", "it is read with model.lora.rank above 0 alone", (), refused=False, part=True),
    Retired("transfer_queue", NO_QUEUE, (), refused=False, part=True),
    *(
        Retired(pattern, f"part of the engine {name}, which is not in this version", (), refused=False, part=True)
        for name in OTHER_ENGINES
        for pattern in (f"*.{name}", f"{name}")
    ),
    *(
        Retired(pattern, "part of an engine that is not in this version", (), refused=False, part=True)
        for pattern in ("*.turbo_config", "actor_rollout_ref.*.engine", "engine.backend_config")
    ),
    # engines
    *(
        retired
        for section in ("*.veomni", "engine")
        for retired in (
            *_logged(
                "experts are sharded over all ranks, as other weights are; the numbers are the same",
                {f"{section}.expert_parallel_size": 1},
            ),
            *_logged(_FUSED, {f"{section}.cross_entropy_loss_implementation": None}),
            *_logged(
                "attention over packed sequences is the same with every engine; model.override_config."
                "attn_implementation chooses that of padded ones",
                {f"{section}.attn_implementation": None} if section != "engine" else {},
            ),
            *_logged(
                "model.use_liger chooses kernels of norms, gates and rotations, and PyTorch computes the rest",
                {
                    f"{section}.{layer}_implementation": None
                    for layer in (
                        *("rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss"),
                        *("dsa_attention", "dsa_indexer", "mhc"),
                    )
                },
            ),
        )
    ),
    Retired("*.veomni", "with strategy=veomni the settings of fsdp_config are read", (), refused=False, part=True),
    *_logged(
        _FUSED,
        {
            "*.entropy_from_logits_chunk_size": 2048,
            "*.entropy_from_logits_with_chunking": False,
            "*.entropy_checkpointing": False,
            "critic.model.use_fused_kernels": False,
            "critic.model.fused_kernel_options": "torch",
        },
    ),
    *_logged(_UNPADDED, {"*.pad_to_length": False, "*.pad_bshd_to_minibatch_max": True}),
    *(Retired("*.pad_to_length_bucket", _UNPADDED, (None, 512, 1024), refused=False),),
    *_refused("weights are always read from model.path; leave it true", {"*.load_weight": True}),
    *_logged(
        "a checkpoint is read by any number of ranks, however it was written",
        {
            "*.megatron.dist_ckpt_optim_fully_reshardable": False,
            "*.megatron.distrib_optim_fully_reshardable_mem_efficient": False,
            "*.checkpoint.mbridge_config": {},
            "checkpoint.mbridge_config": {},
        },
    ),
    *_logged(
        "missing or unknown weights in a checkpoint are always an error",
        {"*.checkpoint.strict": True, "checkpoint.strict": True},
    ),
    *_logged(
        "how rows are computed does not change their numbers; model.use_remove_padding decides",
        {"*megatron.use_remove_padding": True, "engine.use_remove_padding": True},
    ),
    *_refused(
        "it is not in this version; megatron-core's layers are divided as the sizes say",
        {
            "engine.use_megatron_fsdp": False,
            "*megatron.use_megatron_fsdp": False,
            "*megatron.dynamic_context_parallel": False,
        },
    ),
    *_refused(
        "a setting of the engine automodel, which is not in this version; use strategy, and sizes of megatron",
        {
            **{f"engine.{name}": 1 for name in ("cp_size", "ep_size", "pp_size", "tp_size", "dp_replicate_size")},
            "engine.distributed_strategy": "fsdp2",
            "engine.attn_implementation": None,
        },
    ),
    *_logged("model.enable_gradient_checkpointing decides", {"engine.activation_checkpointing": True}),
    *_logged("part of dynamic_context_parallel", {"*megatron.max_seqlen_per_dp_cp_rank": None}),
    *_refused("only the policy's own choice of experts is replayed", {"*.megatron.router_replay.mode": "disabled"}),
    *_refused(
        "choices of routers are not written to files; leave it null",
        {"*.megatron.router_replay.record_file": None, "*.megatron.router_replay.replay_file": None},
    ),
    Retired("*.megatron.router_replay._target_", "a section has its own class", (), refused=False, part=True),
    *_logged("actor_rollout_ref.nccl_timeout applies to all roles", {"critic.nccl_timeout": 600}),
    *_refused(
        "the critic's chat template and configuration are the policy's, or those of its model; leave it null",
        {"critic.model.custom_chat_template": None, "critic.model.hf_config_path": None},
    ),
    *_refused("the critic's loss has no separate scale", {"critic.loss_scale_factor": None}),
    # schedules and optimizers
    *(
        retired
        for optim in OPTIMIZERS
        for retired in (
            *_logged("the first update of a warm-up has 1/(w+1) of the rate", {f"{optim}.zero_indexed_step": True}),
            *_refused(
                "the schedule falls until the end of the run; leave it null",
                {f"{optim}.lr_wsd_decay_steps": None},
            ),
            *_logged("part of a schedule that is not in this version", {f"{optim}.lr_wsd_decay_style": "exponential"}),
            *_refused("weight decay is constant; leave it out", {f"{optim}.weight_decay_incr_style": "constant"}),
            *_refused("gradients are summed in fp32; leave it out", {f"{optim}.main_grads_dtype": "fp32"}),
            *_refused("the optimizer's own weights are fp32; leave it out", {f"{optim}.main_params_dtype": "fp32"}),
            *_logged(
                "exp_avg_dtype and exp_avg_sq_dtype say how moments are stored",
                {f"{optim}.use_precision_aware_optimizer": False},
            ),
            *_logged(
                "it saves memory, and the numbers are the same",
                {f"{optim}.use_layer_wise_distributed_optimizer": False, f"{optim}.store_param_remainders": False},
            ),
            *_logged("a resumed run continues its schedule", {f"{optim}.use_checkpoint_opt_param_scheduler": False}),
            *_refused(
                "the optimizer keeps fp32 weights in addition to those of another precision; leave it out",
                {f"{optim}.master_weights": True},
            ),
            *_refused(
                "override_optimizer_config.adjust_lr_fn says how updates of Muon are scaled; leave it out",
                {f"{optim}.muon_scale_mode": "spectral", f"{optim}.muon_extra_scale_factor": 1.0},
            ),
            *_refused(
                "queries, keys and values are matrices of their own; leave it true", {f"{optim}.muon_split_qkv": True}
            ),
            *_refused("AdamW moves all other weights; leave it out", {f"{optim}.muon_scalar_optimizer": "adam"}),
            *_refused("set override_optimizer_config.ns_coefficients", {f"{optim}.muon_coefficient_type": "quintic"}),
            *_logged(
                "updates are those of whole matrices, which PyTorch computes in bf16",
                {f"{optim}.muon_tp_mode": "blockwise", f"{optim}.muon_fp32_matmul_prec": "medium"},
            ),
            Retired(
                f"{optim}.muon_match_adamw_update_rms",
                "override_optimizer_config.adjust_lr_fn says how updates of Muon are scaled, by default like AdamW's",
                (None,),
                refused=False,
                part=True,
            ),
            Retired(f"{optim}.muon_*", "optim.optimizer is not Muon", (), refused=False, part=True),
        )
    ),
    # rollout
    *_refused(
        "each response has its own seed, and the engine chooses its kernels; leave it false",
        {"actor_rollout_ref.rollout.full_determinism": False},
    ),
    *_logged("trainer.log_expert_counts counts them", {"*.moe_load_balance_metrics_interval": 0}),
    Retired(
        "actor_rollout_ref.rollout.trace.project_name",
        "a trace has the names of its run: trainer.project_name and trainer.experiment_name",
        (None, "${trainer.project_name}"),
        refused=False,
    ),
    Retired(
        "actor_rollout_ref.rollout.trace.experiment_name",
        "a trace has the names of its run: trainer.project_name and trainer.experiment_name",
        (None, "${trainer.experiment_name}"),
        refused=False,
    ),
    *_logged(
        "all steps are kept, and steps that are not there are sampled",
        {f"{_SKIP}.action": "cache", f"{_SKIP}.max_dump_step": 1, "skip.*.action": "cache", "skip.*.steps": []},
    ),
    Retired(f"{_SKIP}._target_", "a section has its own class", (), refused=False, part=True),
    Retired("skip._target_", "a section has its own class", (), refused=False, part=True),
    # fully_async_main
    *_logged(
        "actor_rollout_ref.rollout.gpu_memory_utilization counts on ranks of their own too",
        {"actor_rollout_ref.rollout.standalone_gpu_memory_utilization": None},
    ),
    *_logged("validation is sampled by the rollout engines", {"async_training.use_trainer_do_validate": False}),
    *_refused(
        "ranks do not change between training and sampling; leave it false",
        {"async_training.use_dynamic_resource_scheduling": False},
    ),
    *_logged(
        "part of ranks that change between training and sampling, which is not in this version",
        {
            "async_training.dynamic_schedule_policy": "default",
            "async_training.dynamic_schedule_deactivate_ratio": 0.3,
            "async_training.dynamic_schedule_enable_rebalance": True,
        },
    ),
    *_logged(
        "actor_rollout_ref.rollout.max_num_seqs says how many responses an engine draws at once; others wait",
        {"async_training.concurrent_samples_per_replica": 16},
    ),
    *_logged(
        "algorithm.rollout_correction.bypass_mode says which log-probs are the old ones",
        {"async_training.compute_prox_log_prob": False, "actor_rollout_ref.actor.use_rollout_log_probs": True},
    ),
    Retired(
        "async_training.checkpoint_engine",
        "actor_rollout_ref.rollout.checkpoint_engine has the settings of the transfer of weights",
        (),
        refused=False,
        part=True,
    ),
    *_logged("one batch is sampled at a time", {"algorithm.filter_groups.max_inflight_gen_batches": 1}),
    # the judge's engine
    *_logged(
        _REQUESTS,
        {
            f"reward_model.rollout.{name}": default
            for name, default in (("do_sample", True), ("n", 1), ("temperature", 1.0), ("top_k", -1), ("top_p", 1))
        },
    ),
    *_logged(_REQUESTS, {"reward_model.rollout.ignore_eos": False, "reward_model.rollout.seed": 42}),
    *_logged(
        "the engine of a judge gets its weights once",
        {"reward_model.rollout.layered_summon": False, "reward_model.rollout.multi_stage_wake_up": False},
    ),
    *_refused(
        "the engine of a judge has no such setting; leave it out",
        {
            "reward_model.rollout.pipeline_model_parallel_size": 1,
            "reward_model.rollout.scheduling_policy": "fcfs",
            "reward_model.rollout.full_determinism": False,
            "reward_model.rollout.mtp": None,
            "reward_model.rollout.quantization_config_file": None,
        },
    ),
    # data
    *_logged("sounds are not in this version", {"data.audio_key": "audios"}),
    *_refused(
        "the image processor uses the settings of its file, preprocessor_config.json",
        {"data.mm_processor_kwargs": {}},
    ),
    *_refused("set data.apply_chat_template_kwargs.enable_thinking", {"data.enable_thinking_default": "none"}),
    # profilers
    *_logged(
        _OTHER_TOOLS,
        {
            "*profiler.finish_hook_cmd": None,
            "*profiler.finish_hook_all_ranks": False,
            "*profiler.finish_hook_ranks": [],
            "*profiler.relocate_results": False,
            "*profiler.tool_config.*.profile_token_start": None,
            "*profiler.tool_config.*.profile_token_end": None,
        },
    ),
    *(
        Retired(pattern, _OTHER_TOOLS, (), refused=False, part=True)
        for pattern in ("*profiler.tool_config.torch.schedule", "*profiler.*precision_debugger")
    ),
    *_logged(
        "only reinforcement learning is profiled", {"profiler.enable": False, "trainer.profile_interval": [-1, -1]}
    ),
    Retired("profiler", "only reinforcement learning is profiled", (), refused=False, part=True),
)

FREE_SECTIONS = ("override_transformer_config", "override_optimizer_config")
"""Keys that hold entries of any name; those of ``FREE_ENTRIES`` are judged like keys, and taken out."""

_SIZE_KEYS = ("sequence_parallel", "context_parallel_size", "use_distributed_optimizer")
_OPTIMIZER_MEMORY = (
    *("overlap_cpu_optimizer_d2h_h2d", "use_torch_optimizer_for_cpu_offload", "pin_cpu_grads", "pin_cpu_params"),
)


def _entries(section: str, names: tuple[str, ...]) -> dict[str, None]:
    return {f"*.{section}.{name}": None for name in names} | {f"{section}.{name}": None for name in names}


FREE_ENTRIES: tuple[Retired, ...] = (
    *(
        retired
        for name, why in IDLE.items()
        for retired in _logged(why, _entries("override_transformer_config", (name,)))
    ),
    *_logged("the section `megatron` has a key of this name", _entries("override_transformer_config", _SIZE_KEYS)),
    *_refused(
        "the model is built as its Hugging Face config says; leave it out",
        {"*override_transformer_config.normalization": "RMSNorm", "*override_transformer_config.swiglu": True},
    ),
    *_logged(
        "state in host memory is copied to the device for its step, a part at a time, and the numbers are the same",
        _entries("override_optimizer_config", _OPTIMIZER_MEMORY),
    ),
    *_logged(
        "it is read beside optimizer_cpu_offload",
        _entries("override_optimizer_config", ("optimizer_offload_fraction", "offload_fraction")),
    ),
    *_logged(
        "exp_avg_dtype and exp_avg_sq_dtype of optim say how moments are stored",
        _entries("override_optimizer_config", ("use_precision_aware_optimizer",)),
    ),
)
