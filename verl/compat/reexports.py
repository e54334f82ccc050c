"""Names that modules of other versions of verl show besides their own, because they import them, and where they live.

:mod:`verl.compat.import_hooks` looks here when a module is asked for a name that it has not. So nothing is imported
before, and a module of a low layer may show names from above.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

_AGENT_LOOP = "verl.agents.loop"
_CALLS = "verl.compat.toolkit.calls"
_DISPATCH = "verl.single_controller.base.dispatch"
_RAY = "verl.single_controller.ray"
_SECTIONS = "verl.config"
_TENSORS = "verl.compat.toolkit.tensors"
_TRACES = "verl.compat.toolkit.traces"

REEXPORTS: Mapping[str, Mapping[str, str]] = {
    "verl.experimental.agent_loop": {
        _AGENT_LOOP: "AgentLoopOutput",
        "verl.agents.tool_agent": "ToolAgentLoop",
        "verl.compat.toolkit.agents": "get_trajectory_info",
    },
    "verl.experimental.agent_loop.agent_loop": {
        "verl.protocol": "DataProto",
        _SECTIONS: "HFModelConfig RolloutConfig",
        "verl.agents.policy": "LLMServerClient",
        "verl.datasets": "RLHFDataset",
        _CALLS: "auto_await get_event_loop",
        "verl.compat.toolkit.chat": "apply_chat_template get_processor_token_id initialize_system_prompt",
        "verl.compat.toolkit.config": "is_distillation_enabled omega_conf_to_dataclass",
        "verl.compat.toolkit.files": "resolve_config_path",
        _TRACES: "RolloutTraceConfig rollout_trace_attr",
        "verl.datasets.build": "get_dataset_class",
        "verl.utils.metric": "simple_timer",
        "verl.utils.model": "compute_position_id_with_mask",
        "verl.utils.tokenizer": "normalize_token_ids",
    },
    "verl.experimental.agent_loop.tool_agent_loop": {
        _AGENT_LOOP: "AgentLoopBase AgentLoopOutput register",
        "verl.agents.parsers": "FunctionCall ToolParser",
        "verl.agents.policy": "TokenOutput",
        "verl.tools.function_tool": "FunctionTool normalize_function_tool_return",
        "verl.tools.schemas": "OpenAIFunctionCallSchema OpenAIFunctionParsedSchema ToolResponse",
        _TRACES: "rollout_trace_op",
        "verl.compat.toolkit.agents": "ToolListWrap",
        "verl.utils.metric": "simple_timer",
    },
    "verl.experimental.agent_loop.tool_parser": {
        "verl.tools.schemas": "OpenAIFunctionToolSchema",
        _CALLS: "get_event_loop",
        _TRACES: "rollout_trace_op",
    },
    "verl.experimental.fully_async_policy.fully_async_main": {
        "verl.base.fs": "copy_to_local",
        "verl.trainer.config.reward_section": "migrate_legacy_reward_impl",
        "verl.trainer.roles": "Role",
        "verl.utils.device": "auto_set_device",
    },
    "verl.experimental.one_step_off_policy.main_ppo": {
        "verl.compat.toolkit.config": "validate_config",
        "verl.datasets": "create_rl_dataset create_rl_sampler",
        "verl.trainer.roles": "need_critic need_reference_policy",
        "verl.utils.device": "auto_set_device",
    },
    "verl.experimental.reward_loop.reward_loop": {
        "verl.protocol": "DataProto pad_dataproto_to_divisor",
        _RAY: "RayResourcePool",
        "verl.base.fs": "copy_to_local",
        "verl.trainer.ppo.reward": "load_reward_manager resolve_reward_manager_cls",
        "verl.utils.tokenizer": "hf_tokenizer",
        _CALLS: "get_event_loop",
    },
    "verl.experimental.agent_loop.utils": {"verl.compat.toolkit.files": "resolve_config_path"},
    "verl.experimental.reward_loop.reward_manager.base": {
        "verl.protocol": "DataProto",
        "verl.workers.reward_manager.abstract": "RawRewardFn",
        _CALLS: "get_event_loop",
    },
    "verl.protocol": {
        "verl.compat.toolkit.dicts": "union_two_dict",
        "verl.utils.device": "get_device_id get_torch_device",
        "verl.utils.torch_functional": "allgather_dict_tensors",
    },
    "verl.single_controller.base.decorator": {
        "verl.protocol": "DataProtoFuture",
        _DISPATCH: (
            "dispatch_one_to_all dispatch_dp_compute_data_proto dispatch_dp_compute_data_proto_with_func "
            "collect_dp_compute_data_proto dispatch_all_to_all=dispatch_as_is collect_all_to_all=collect_as_is "
            "dispatch_dp_compute=dispatch_as_is collect_dp_compute=collect_as_is "
            "dispatch_lazy_compute_data_proto=dispatch_nd_compute_data_proto "
            "collect_lazy_compute_data_proto=collect_nd_compute_data_proto "
            "dummy_direct_rollout_call=dispatch_refused"
        ),
    },
    "verl.single_controller.ray.base": {
        "verl.protocol": "DataProto",
        "verl.single_controller.base": "ClassWithInitArgs ResourcePool Worker WorkerGroup",
        "verl.single_controller.base.decorator": "Dispatch MAGIC_ATTR",
        "verl.utils.device": "get_device_name",
        "verl.compat.toolkit.imports": "is_torch_npu_available",
        "verl.compat.toolkit.processes": "get_random_string temp_env_var",
    },
    "verl.tools.base_tool": {_TRACES: "rollout_trace_op"},
    "verl.tools.function_tool": {"verl.tools.function_tool": "load_function_tools_from_path=load_function_tools"},
    "verl.trainer.distillation.losses": {
        _SECTIONS: "ActorConfig BaseConfig DistillationConfig DistillationLossConfig",
        "verl.algorithms": "agg_loss get_policy_loss_fn kl_penalty",
        "verl.compat.toolkit.distillation": "DISTILLATION_LOSS_REGISTRY",
        "verl.compat.toolkit.losses": "ppo_loss",
        "verl.compat.toolkit.padding": "no_padding_2_padding",
        "verl.utils.metric": "AggregationType Metric",
    },
    "verl.trainer.main_ppo": {
        "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
        "verl.compat.toolkit.config": "is_distillation_enabled validate_config",
        "verl.compat.toolkit.imports": "load_class_from_fqn",
        "verl.utils.device": "auto_set_device is_cuda_available",
        _CALLS: "deprecated",
    },
    "verl.trainer.ppo.core_algos": {
        _SECTIONS: "ActorConfig AlgoConfig",
        "verl.algorithms.groups": "as_torch_index group_mean_std",
        _CALLS: "deprecated",
    },
    "verl.trainer.ppo.metric_utils": {
        "verl.base.fs": "copy_to_local",
        "verl.utils.model": "update_model_config",
        _CALLS: "deprecated",
    },
    "verl.trainer.ppo.ray_trainer": {
        "verl.protocol": "DataProto pad_dataproto_to_divisor unpad_dataproto",
        _RAY: "RayClassWithInitArgs RayWorkerGroup ResourcePoolManager create_colocated_worker_cls",
        "verl.single_controller.base.worker": "WorkerType",
        "verl.trainer.ppo": "core_algos",
        "verl.algorithms": "agg_loss",
        _SECTIONS: "AlgoConfig DistillationConfig",
        "verl.trainer.ppo.metric_utils": (
            "compute_data_metrics compute_throughout_metrics compute_timing_metrics compute_variance_proxy_metrics "
            "process_validation_metrics"
        ),
        "verl.trainer.ppo.reward": "extract_reward",
        "verl.datasets": "create_rl_dataset create_rl_sampler",
        "verl.utils.metric": "reduce_metrics",
        "verl.tracking": "ValidationGenerationsLogger",
        "verl.utils.seqlen_balancing": "calculate_workload get_seqlen_balanced_partitions log_seqlen_unbalance",
        "verl.utils.torch_functional": "masked_mean",
        "verl.utils": "tu=tensordict_utils",
        "verl.compat.toolkit.checkpoints": "find_latest_ckpt_path should_save_ckpt_esi",
        "verl.compat.toolkit.config": "is_distillation_enabled omega_conf_to_dataclass",
        "verl.trainer.roles": "need_teacher_policy",
        "verl.compat.toolkit.dicts": "rename_dict",
        "verl.compat.toolkit.rollouts": "RolloutSkip",
        "verl.compat.toolkit.imports": "load_class_from_fqn",
        "verl.compat.toolkit.padding": "left_right_2_no_padding no_padding_2_padding",
        "verl.compat.toolkit.timing": "marked_timer _timer=marked_timer",
        _CALLS: "deprecated",
    },
    "verl.trainer.ppo.reward": {
        "verl.compat.toolkit.scoring": "get_default_compute_score",
        "verl.workers.reward_manager.abstract": "RawRewardFn",
    },
    "verl.trainer.ppo.rollout_corr_helper": {_SECTIONS: "PolicyLossConfig RolloutCorrectionConfig"},
    "verl.trainer.ppo.utils": {
        "verl.algorithms": "AdvantageEstimator",
        "verl.single_controller.base.worker": "Worker WorkerType",
        "verl.datasets": "create_rl_dataset create_rl_sampler",
        "verl.compat.toolkit.config": "is_distillation_enabled",
    },
    "verl.utils": {"verl.compat.toolkit.config": "omega_conf_to_dataclass validate_config"},
    "verl.utils.dataset.multiturn_sft_dataset": {
        "verl.compat.toolkit.chat": "apply_chat_template extract_system_prompt_and_generation",
        "verl.compat.toolkit.files": "copy_local_path_from_hdfs",
        "verl.compat.toolkit.names": "DatasetPadMode",
        "verl.utils.tokenizer": "hf_tokenizer",
        "verl.vision.images": "process_image",
    },
    "verl.utils.chat_template": {"verl.utils.tokenizer": "normalize_token_ids"},
    "verl.utils.dataset.rl_dataset": {
        "verl.datasets.build": "get_dataset_class",
        "verl.compat.toolkit.imports": "load_extern_object",
        "verl.utils.tokenizer": "normalize_token_ids",
    },
    "verl.utils.model": {
        "verl.compat.toolkit.imports": "is_trl_available",
        "verl.compat.toolkit.models": (
            "LambdaLayer check_exclude_modules check_target_modules create_huggingface_actor create_random_mask "
            "get_auto_model_for_vision2seq get_hf_auto_model_class get_huggingface_actor_config "
            "get_lora_rank_from_adapter get_model_size pad_packed_inputs squeeze"
        ),
    },
    "verl.utils.profiler": {
        "verl.compat.toolkit.imports": "is_nvtx_available",
        "verl.utils.device": "is_npu_available",
    },
    "verl.utils.ray_utils": {"verl.single_controller.ray.store": "parallel_put"},
    "verl.utils.reward_score": {
        _CALLS: "deprecated",
        "verl.compat.toolkit.scoring": "get_default_compute_score",
        "verl.plugins.sandbox": "prime_code sandbox_fusion",
    },
    "verl.utils.rollout_skip": {"verl.protocol": "DataProto", _SECTIONS: "RolloutConfig"},
    "verl.utils.rollout_trace": {_CALLS: "get_event_loop"},
    "verl.utils.tokenizer": {"verl.compat.toolkit.chat": "get_processor_token_id set_pad_token_id"},
    "verl.utils.torch_functional": {
        "verl.utils.device": "get_device_name get_torch_device",
        "verl.utils.torch_functional": (
            "logprobs_from_logits_naive=logprobs_from_logits logprobs_from_logits_v2=logprobs_from_logits"
        ),
        _TENSORS: (
            "allgather_dict_into_dict broadcast_dict_tensor calculate_sum_pi_squared_from_logits "
            "check_device_is_available clip_by_value compute_grad_norm distributed_masked_mean "
            "distributed_mean_max_min_std entropy_from_logits_with_chunking expand_as_nested gather_from_labels "
            "get_unpad_data get_wsd_schedule_with_warmup log_probs_from_logits_all_rmpad "
            "log_probs_from_logits_response log_probs_from_logits_response_rmpad post_process_logits "
            "postprocess_data prepare_decoder_attention_mask remove_pad_token split_dict_tensor_into_batches "
            "tokenize_and_postprocess_data"
        ),
    },
    "verl.utils.import_utils": {"verl.compat.toolkit.files": "resolve_config_path"},
    "verl.utils.py_functional": {"verl.compat.toolkit.processes": "get_random_string"},
    "verl.utils.ulysses": {"verl.utils.ulysses": "gather_outpus_and_unpad=gather_outputs_and_unpad"},
    "verl.workers.config": {"verl.config.agent": "CustomAsyncServerConfig"},
    "verl.workers.config.actor": {
        _SECTIONS: (
            "BaseConfig CheckpointConfig FSDPEngineConfig HFModelConfig McoreEngineConfig OptimizerConfig "
            "RolloutCorrectionConfig"
        ),
        "verl.compat.toolkit.profiler": "ProfilerConfig",
    },
    "verl.workers.config.distillation": {
        _SECTIONS: "BaseConfig RolloutConfig",
        "verl.compat.toolkit.config": "omega_conf_to_dataclass",
    },
    "verl.workers.config.rollout": {
        _SECTIONS: "BaseConfig",
        "verl.config.agent": "CustomAsyncServerConfig",
        "verl.compat.toolkit.profiler": "ProfilerConfig",
    },
    "verl.workers.engine.base": {"verl.utils.device": "get_device_name"},
    "verl.workers.engine_workers": {
        _SECTIONS: "ActorConfig DistillationConfig HFModelConfig RolloutConfig",
        "verl.compat.toolkit.losses": "ppo_loss",
        "verl.single_controller.base": "Worker",
        "verl.single_controller.base.decorator": "Dispatch make_nd_compute_dataproto_dispatch_fn register",
        "verl.compat.toolkit.dicts": "append_to_dict",
        "verl.compat.toolkit.imports": "import_external_libs",
        "verl.compat.toolkit.memory": "aggressive_empty_cache log_gpu_memory_usage",
        "verl.compat.toolkit.processes": "initialize_global_process_group_ray set_numa_affinity",
        "verl.compat.toolkit.profiler": "DistProfiler DistProfilerExtension ProfilerConfig",
        _TENSORS: "allgather_dict_into_dict",
        "verl.compat.toolkit.config": "is_distillation_enabled omega_conf_to_dataclass",
        "verl.utils": "tu=tensordict_utils",
        "verl.utils.device": "get_device_name get_torch_device set_expandable_segments",
        "verl.utils.flops_counter": "FlopsCounter",
        "verl.utils.metric": "Metric",
        "verl.workers.rollout": "BaseRollout get_rollout_class",
    },
    "verl.workers.rollout.base": {"verl.compat.toolkit.config": "omega_conf_to_dataclass"},
    "verl.workers.utils.losses": {"verl.utils": "tu=tensordict_utils"},
}
"""Module → home → names, separated by spaces; ``tu=tensordict_utils`` is a name that the home calls otherwise."""


@functools.cache
def home_of(module: str, name: str) -> tuple[str, str] | None:
    """Return the module that holds a re-exported name, and what the name is there."""
    for home, names in REEXPORTS.get(module, {}).items():
        for entry in names.split():
            shown, _, there = entry.partition("=")
            if shown == name:
                return home, there or shown
    return None
