"""Public names of other versions of verl that this version lacks on purpose, and what to use here instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Absence:
    """Reason for which names are absent, and what to use in their place."""

    kind: Literal["not yet", "other design", "no use"]
    sentence: str


def absence_of(address: str) -> Absence | None:
    """Return the row of an address (``verl.tools.schemas.ToolResponse``) or of the nearest package above it."""
    while address:
        if address in ABSENT:
            return ABSENT[address]
        address = address.rpartition(".")[0]
    return None


def why_absent(address: str) -> str | None:
    """Return the sentence of :func:`absence_of`, for an error message."""
    absence = absence_of(address)
    return absence and f"{address} is not in this version of verl ({absence.kind}). {absence.sentence}"


_AGENTS = Absence(
    "not yet",
    "Of agent loops there are AgentLoopBase, AgentLoopOutput, AgentLoopMetrics and register here "
    "(verl.experimental.agent_loop.agent_loop); simulated users are verl.interactions, environments verl.environments.",
)
_ASYNCHRONOUS = Absence(
    "not yet",
    "Rollout beside training, and its servers on Ray, are missing: here the rollout engine of each rank generates "
    "between updates (verl.workers.rollout.base.BaseRollout) and takes new weights by load_weights.",
)
_ASYNCHRONOUS_TRAINERS = Absence(
    "other design",
    "Sampling beside training is a mode of the one trainer, not a trainer of its own: trainer.async.lag and "
    "trainer.v1.trainer_mode choose it, also for the commands fully_async_main and one_step_off_policy.main_ppo "
    "(docs/asynchronous.md).",
)
_MEGATRON = Absence("other design", "verl.plugins.megatron builds, trains and converts models.")
_VISION = Absence(
    "other design",
    "Images and videos in prompts are read by RLHFDataset and verl.vision (docs/images.md, docs/images.md): "
    "verl.vision.videos.open_video chooses frames, and its frames() gives the pictures.",
)
_LORA = Absence(
    "other design",
    "Adapters are those of peft: verl.workers.engine.model.adapters adds, merges and writes them, and an engine's "
    "get_per_tensor_param gives merged weights, its adapted_weights base and adapters apart. Each checkpoint has "
    "them in lora_adapter, for peft.",
)
_TEACHERS = Absence(
    "other design",
    "Teachers are workers (verl.workers.teacher), which score the responses of a step in one call each, those of agent "
    "loops too; so loops and their managers have no client of a teacher. Settings: distillation.*; a divergence of "
    "your own: verl.trainer.distillation.losses.register_distillation_loss.",
)

_DIVERGENCES = Absence(
    "other design",
    "The loss of an update is verl.workers.losses.DistillationLoss, of divergences that verl.algorithms.distillation "
    "computes (evaluate_distillation_loss) or that engines do (verl.workers.engine.model.divergence). Add your own by "
    "register_distillation_loss.",
)
_ACTOR = Absence(
    "other design",
    "The update of a model is verl.workers.update with the losses of verl.workers.losses, called by "
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.update_actor and CriticWorker.update_critic. A loss of your own: "
    "verl.trainer.ppo.core_algos.register_policy_loss.",
)
_FSDP1 = Absence("other design", "Models are sharded by FSDP2, not FSDP1: verl.workers.engine.fsdp.sharding.")
_NO_PATCHES = Absence(
    "other design",
    "Models of Transformers are used without patches: packing is a property of the attention call "
    "(verl.workers.packed_attention), and the engine asks the model for its logits (verl.workers.engine.fsdp).",
)
_RESHARDING = Absence(
    "other design",
    "Weights reach the rollout engine by `with rollout.awake(engine.get_per_tensor_param, engine.weight_version)` "
    "(verl.workers.rollout.base); no manager switches modes.",
)
_OTHER_ENGINE_CLASSES = Absence(
    "other design",
    "vLLM as rollout engine is one class, verl.workers.rollout.vllm_rollout.VLLMRollout, of a server.",
)

_NVTX = Absence("no use", "Profilers are those of PyTorch (global_profiler.tool); none injects code into processes.")
_ROUTER = Absence(
    "other design",
    "verl.serving.router.Router chooses the engine of each request: that of its conversation, or for a new one the "
    "engine with the fewest requests. It cannot be replaced by a setting.",
)
_QUEUE = Absence("not yet", "The transfer queue is missing: batches travel as verl.DataProto; leave the decorator out.")
_OTHER_DEVICES = Absence("not yet", "Devices are NVIDIA's GPUs and CPUs, training back ends fsdp, fsdp2 and megatron.")
_SERVERS_ON_RAY = Absence(
    "not yet", "The rollout engine runs on the ranks of the actor; what stands for its servers is missing."
)
_REWARD_MANAGER = Absence(
    "other design",
    "A manager of your own derives from verl.workers.reward_manager.AbstractRewardManager; "
    "verl.trainer.ppo.reward.load_reward_manager makes the one of a configuration.",
)
_FUNCTIONS_OF_MODES = Absence(
    "other design",
    "verl.single_controller.base.decorator.make_nd_compute_dataproto_dispatch_fn(mesh_name) gives both functions of "
    "such a mode; get_predefined_dispatch_fn(mode) gives those of the others.",
)
_SKIP = Absence(
    "other design",
    "Stored responses are read and written with rollout.skip_rollout=true, and by the one method of "
    "verl.utils.rollout_skip.RolloutSkip, wrap_generate_sequences; a file is read by DataProto.load_from_disk.",
)
_CORRECTION = Absence(
    "other design",
    "compute_rollout_correction_and_rejection_mask gives weights, mask and metrics together, and "
    "compute_offpolicy_metrics those of the gap.",
)
_QUEUE_TRAINER = Absence(
    "not yet",
    "The trainer on a transfer queue is missing; verl.trainer.ppo.ray_trainer.RayPPOTrainer is the one trainer, and "
    "its stages are methods that a subclass may replace (docs/custom_trainers.md).",
)
_PROFILED = Absence(
    "other design", "Steps and ranks to profile are settings: global_profiler.steps, actor_rollout_ref.actor.profiler."
)
_PRIVATE = Absence("no use", "It is an inner part of another implementation; nothing here takes or gives it.")
_PLACES = Absence(
    "other design",
    "Ranks are placed by verl.single_controller.ray: RayResourcePool, split_resource_pool, merge_resource_pool; a "
    "worker knows its own address (get_master_addr_port).",
)
_EXPERT_LOAD = Absence("not yet", "The load of experts in the rollout is missing among the metrics.")
_PARSERS = Absence(
    "not yet",
    "Parsers of tool calls here are hermes, llama3_json, mistral, pythonic, qwen3_coder, glm, gpt-oss and deepseek; "
    "one of your own derives from verl.agents.parsers.ToolParser.",
)
_TRACKERS = Absence(
    "other design",
    "A tracker is chosen by name: verl.utils.tracking.Tracking(project_name, experiment_name, ['file', 'clearml']).",
)
_VALUE_HEAD = Absence(
    "other design", "verl.workers.engine.model.headed.build_model('value_model', ...) puts the head on a model."
)
_COMPILED = Absence("no use", "Functions of this version run uncompiled, and without GPU kernels of other libraries.")

_TRAINER = "verl.trainer.ppo.ray_trainer.RayPPOTrainer"

ABSENT: dict[str, Absence] = {
    "verl.checkpoint_engine": Absence(
        "other design",
        "Weights go to rollout ranks of their own by verl.workers.transfer.WeightTransfer; a backend of your own "
        "derives from its WeightTransport, registered by register_transfer (docs/internals/weight_transfer.md).",
    ),
    "verl.distributed_engine": Absence(
        "other design", "Workers on many machines are verl.single_controller: worker groups and pools on Ray."
    ),
    "verl.experimental.agent_loop": _AGENTS,
    "verl.experimental.fully_async_policy": _ASYNCHRONOUS_TRAINERS,
    "verl.experimental.one_step_off_policy": _ASYNCHRONOUS_TRAINERS,
    "verl.experimental.reward_loop.RewardLoopManager": Absence(
        "other design",
        "Rewards are computed in processes of the reward manager: verl.trainer.ppo.reward.load_reward_manager; a "
        "reward model that scores is verl.workers.fsdp_workers.RewardModelWorker, one that is asked "
        "verl.plugins.endpoint.judge.JudgeService.",
    ),
    "verl.experimental.separation": _ASYNCHRONOUS_TRAINERS,
    "verl.experimental.teacher_loop": _TEACHERS,
    "verl.llm_backends": Absence(
        "other design",
        "Models are those of Transformers (verl.utils.model), and rollout engines share the interface "
        "verl.workers.rollout.base.BaseRollout.",
    ),
    "verl.model_merger.lora_adapter": _LORA,
    "verl.models": Absence(
        "other design",
        "Models are those of Transformers, loaded by verl.utils.model and wrapped by verl.workers.engine.model.headed; "
        "this package has no code for single architectures.",
    ),
    "verl.models.mcore": _MEGATRON,
    "verl.models.transformers": _NO_PATCHES,
    "verl.models.transformers.qwen2_vl": _VISION,
    "verl.models.transformers.qwen3_vl": _VISION,
    "verl.rl_algorithms": Absence(
        "other design",
        "An algorithm is a function by name, not a class: verl.trainer.ppo.core_algos.register_adv_est and "
        "register_policy_loss.",
    ),
    "verl.tools.geo3k_tool": _VISION,
    "verl.tools.image_zoom_in_tool": _VISION,
    "verl.trainer.grpo": Absence(
        "other design", "GRPO is verl.trainer.ppo.ray_trainer.RayPPOTrainer with algorithm.adv_estimator=grpo."
    ),
    f"{_TRAINER}.llm_server_manager": _ASYNCHRONOUS,
    f"{_TRAINER}.tq_client": _QUEUE,
    f"{_TRAINER}.use_legacy_worker_impl": Absence("no use", "There is one implementation of the workers."),
    f"{_TRAINER}._create_worker_classes": Absence(
        "other design", "Override worker_arguments, or write init_workers (docs/custom_trainers.md)."
    ),
    f"{_TRAINER}._init_worker_groups": Absence(
        "other design", "Override start_workers, or write init_workers (docs/custom_trainers.md)."
    ),
    f"{_TRAINER}._init_resource_pools": Absence(
        "other design", "The pools are made by resource_pool_manager.create_resource_pool()."
    ),
    "verl.trainer.constants_ppo.NVTX_INJECTION_ENV": _NVTX,
    "verl.trainer.histoSpec": Absence("no use", "It is a module of one project's own copy of verl."),
    "verl.utils.checkpoint.checkpoint_manager.is_device_available": Absence(
        "no use", "verl.utils.device.is_cuda_available says whether there is a GPU; all other devices are CPUs."
    ),
    "verl.utils.checkpoint.megatron_checkpoint_manager": _MEGATRON,
    "verl.utils.config.ConfigManager": Absence(
        "other design", "verl.trainer.config.load_config checks a configuration and makes typed sections of it."
    ),
    "verl.utils.config.ConfigParser": Absence(
        "other design", "verl.trainer.config.load_config checks a configuration and makes typed sections of it."
    ),
    "verl.utils.dataset.rl_dataset.RLHFDataset.process_vision_info": _VISION,
    "verl.utils.dataset.vision_utils.process_multi_modal_inputs_for_minicpmo": _VISION,
    "verl.utils.dataset.vision_utils.process_video": _VISION,
    "verl.utils.distributed.stateless_init_process_group": Absence(
        "no use", "Weights go to a rollout engine by the engine's own channel: verl.workers.rollout.weights."
    ),
    "verl.utils.fsdp_utils.FSDPManager": Absence(
        "other design", "verl.workers.engine.fsdp.engine.FSDPEngine shards, trains, moves and saves a model."
    ),
    "verl.utils.fsdp_utils.collect_lora_params": _LORA,
    "verl.utils.fsdp_utils.layered_summon_lora_params": _LORA,
    "verl.utils.fsdp_utils.replace_lora_wrapper": _LORA,
    "verl.utils.kernel": Absence(
        "other design",
        "Kernels for CPUs are verl.backends.cpu; on GPUs PyTorch's are used, and log-probs come in slices without all "
        "logits at once (verl.workers.engine.model.head).",
    ),
    "verl.utils.logger.aggregate_logger.AggregateLogger": Absence(
        "other design", "verl.utils.tracking.Tracking sends metrics to several trackers at once."
    ),
    "verl.utils.megatron": _MEGATRON,
    "verl.utils.megatron_utils": _MEGATRON,
    "verl.utils.model.normalize_model_name": _MEGATRON,
    "verl.utils.py_functional.DynamicEnum": Absence(
        "other design",
        "Dispatch modes are added by verl.single_controller.base.decorator.register_dispatch_mode; a set of names of "
        "your own is an enum.Enum.",
    ),
    **{
        f"verl.utils.profiler.config.{name}": _SERVERS_ON_RAY
        for name in (
            *("build_vllm_profiler_args", "relocate_rollout_traces", "rollout_profiler_global_ranks"),
            *("rollout_trace_dir", "rollout_trace_local_rank"),
        )
    },
    "verl.utils.device.AscendHardwareVersion": _OTHER_DEVICES,
    "verl.utils.profiler.config.NPUToolConfig": Absence("not yet", "Ascend devices are missing; use tool=torch."),
    "verl.utils.profiler.mstx_profile": Absence("not yet", "Ascend devices are missing; use tool=torch."),
    "verl.utils.profiler.profile.Profiler": Absence(
        "other design", "verl.utils.profiler.DistProfiler with tool=torch runs PyTorch's profiler."
    ),
    "verl.utils.transferqueue_utils": _QUEUE,
    "verl.utils.vllm.patch": Absence(
        "no use", "verl.workers.rollout.vllm_rollout loads weights by vLLM's own loader, without a patch."
    ),
    "verl.workers.actor": _ACTOR,
    "verl.workers.critic": _ACTOR,
    "verl.workers.engine_workers_tinker": Absence(
        "other design",
        "The service that clients of Tinker train over is `verl serve` (docs/plugins/serve.md), whose worker is "
        "verl.plugins.serve.worker.AdapterWorker. A worker that trains on your batches with your loss is "
        "verl.workers.training_workers.TrainingWorker (set_loss_fn, train_batch).",
    ),
    "verl.workers.engine_workers.TrainingWorker.train_mini_batch": Absence(
        "other design",
        "Mini-batches are cut before they are dealt to ranks, so that any number of ranks makes the same steps: call "
        "train_batch for each part of DataProto.make_iterator or DataProto.split.",
    ),
    "verl.workers.engine.fsdp.fsdp_turbo_impl": _OTHER_DEVICES,
    "verl.workers.fsdp_workers.create_device_mesh": Absence(
        "other design",
        "The mesh of the ranks is made by verl.workers.engine.fsdp.sharding.make_mesh(device, fsdp_size).",
    ),
    "verl.workers.fsdp_workers.get_sharding_strategy": _FSDP1,
    "verl.workers.fsdp_workers.get_vl_model_vision_tower": _VISION,
    "verl.workers.megatron_workers.MegatronWorker": Absence(
        "other design",
        "Workers are verl.single_controller.base.Worker, whatever their engine is.",
    ),
    "verl.workers.rollout.base.BaseRollout.device_mesh": Absence(
        "other design",
        "A rollout engine is made by (config, model_config, tokenizer, device); the ranks that share it are "
        "ranks_per_engine.",
    ),
    "verl.workers.rollout.base.BaseRollout.release": Absence("other design", "An engine frees its memory by sleep()."),
    "verl.workers.rollout.base.BaseRollout.resume": Absence("other design", "An engine takes its memory by wake()."),
    "verl.workers.rollout.base.BaseRollout.update_weights": _RESHARDING,
    "verl.workers.rollout.base._ROLLOUT_REGISTRY": Absence(
        "other design",
        "Engines are registered by the decorator verl.workers.rollout.base.RolloutRegistry.register(name).",
    ),
    "verl.workers.rollout.llm_server": _ASYNCHRONOUS,
    "verl.workers.rollout.replica": _ASYNCHRONOUS,
    "verl.workers.rollout.router": _ROUTER,
    "verl.workers.rollout.schemas": _AGENTS,
    "verl.workers.rollout.utils": _ASYNCHRONOUS,
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": _OTHER_ENGINE_CLASSES,
    "verl.workers.rollout.vllm_rollout.delta_weight_transfer": _OTHER_ENGINE_CLASSES,
    "verl.workers.rollout.vllm_rollout.utils": _OTHER_ENGINE_CLASSES,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _ASYNCHRONOUS,
    "verl.workers.rollout.vllm_rollout.vllm_rollout.ServerAdapter": _OTHER_ENGINE_CLASSES,
    "verl.workers.sharding_manager": _RESHARDING,
    "verl.workers.utils.losses.sft_loss": _ACTOR,
    "verl.workers.utils.losses.value_loss": _ACTOR,
    "verl.experimental.agent_loop.tool_agent_loop.build_gpt_oss_tool_response_text": Absence(
        "other design",
        "format_gpt_oss_tool_response_manually(text, name), of verl.experimental.agent_loop.utils, writes one.",
    ),
    "verl.experimental.agent_loop.agent_loop.create_continuous_token_builder": Absence(
        "other design", "verl.agents.conversation.Conversation holds the tokens of a conversation."
    ),
    "verl.experimental.agent_loop.agent_loop.load_all_tools": Absence(
        "other design", "verl.tools.utils.tool_registry.initialize_tools_from_config makes the tools of a file."
    ),
    "verl.experimental.agent_loop.agent_loop.build_multimodal_processor_inputs": _VISION,
    "verl.experimental.agent_loop.tool_parser.DeepSeekV4ToolParser": _PARSERS,
    "verl.experimental.agent_loop.tool_parser.Gemma4ToolParser": _PARSERS,
    "verl.experimental.agent_loop.tool_parser.KimiToolParser": _PARSERS,
    "verl.experimental.agent_loop.tool_parser.MiniMaxToolParser": _PARSERS,
    "verl.experimental.agent_loop.tool_parser.SeedToolParser": _PARSERS,
    "verl.experimental.reward_loop.RewardLoopWorker": _REWARD_MANAGER,
    "verl.experimental.reward_loop.RewardModelManager": _REWARD_MANAGER,
    "verl.experimental.reward_loop.reward_loop.RewardLoopManager": _REWARD_MANAGER,
    "verl.experimental.reward_loop.reward_loop.RewardLoopWorker": _REWARD_MANAGER,
    "verl.experimental.reward_loop.reward_loop.RewardModelManager": _REWARD_MANAGER,
    "verl.experimental.reward_loop.reward_manager.base.RewardManagerBase": _REWARD_MANAGER,
    "verl.experimental.reward_loop.reward_manager.registry.RewardManagerBase": _REWARD_MANAGER,
    "verl.protocol.BatchData": Absence("no use", "Dispatch takes DataProto, TensorDict and futures as they are."),
    "verl.protocol.BatchMeta": _QUEUE,
    "verl.protocol.KVBatchMeta": _QUEUE,
    "verl.single_controller.base.decorator._padding_size_key": _PRIVATE,
    "verl.single_controller.base.decorator.tqbridge": _QUEUE,
    "verl.single_controller.base.decorator.init_predefined_dispatch_mode": _PRIVATE,
    "verl.single_controller.base.decorator.init_predefined_execute_mode": _PRIVATE,
    "verl.single_controller.base.decorator.collect_nd_compute": _FUNCTIONS_OF_MODES,
    "verl.single_controller.base.decorator.collect_nd_compute_dataproto": _FUNCTIONS_OF_MODES,
    "verl.single_controller.base.decorator.dispatch_nd_compute": _FUNCTIONS_OF_MODES,
    "verl.single_controller.base.decorator.dispatch_nd_compute_dataproto": _FUNCTIONS_OF_MODES,
    "verl.single_controller.ray.base._padding_size_key": _PRIVATE,
    "verl.single_controller.ray.base.extract_pg_from_exist": _PLACES,
    "verl.single_controller.ray.base.get_master_addr_port": _PLACES,
    "verl.single_controller.ray.base.sort_placement_group_by_node_ip": _PLACES,
    "verl.single_controller.ray.base.func_generator": _PRIVATE,
    "verl.single_controller.ray.base.get_platform": _OTHER_DEVICES,
    "verl.trainer.distillation.losses.compute_topk_loss": _DIVERGENCES,
    "verl.trainer.distillation.losses.distillation_loss": _DIVERGENCES,
    "verl.trainer.distillation.losses.distillation_ppo_loss": _DIVERGENCES,
    "verl.trainer.main_ppo.TaskRunnerV1": Absence(
        "other design", "verl.trainer.main_ppo.TaskRunner runs the one trainer that there is."
    ),
    "verl.trainer.main_ppo.configure_verl_logging": Absence(
        "no use", "VERL_LOGGING_LEVEL sets the level when verl is imported."
    ),
    "verl.trainer.ppo.metric_utils.RolloutMoELoadBalanceMetricsAccumulator": _EXPERT_LOAD,
    "verl.trainer.ppo.metric_utils.compute_moe_lb_metrics": _EXPERT_LOAD,
    "verl.trainer.ppo.metric_utils.compute_rollout_moe_load_balance_metrics": _EXPERT_LOAD,
    "verl.trainer.ppo.metric_utils.get_hf_config_override_kwargs": _EXPERT_LOAD,
    "verl.trainer.ppo.metric_utils.get_metric_data_with_optional_routed_experts": _EXPERT_LOAD,
    "verl.trainer.ppo.metric_utils.infer_moe_num_experts": _EXPERT_LOAD,
    "verl.trainer.ppo.metric_utils.infer_rollout_moe_num_experts": _EXPERT_LOAD,
    "verl.trainer.ppo.ray_trainer.EngineConfig": Absence(
        "other design", "The sections of the back ends are verl.workers.config.FSDPEngineConfig and McoreEngineConfig."
    ),
    "verl.trainer.ppo.ray_trainer.LLMServerManager": _ASYNCHRONOUS,
    "verl.trainer.ppo.ray_trainer.SkipManager": _SKIP,
    "verl.trainer.ppo.ray_trainer.compute_spec_decode_metrics": Absence(
        "not yet", "Speculative decoding, and metrics of it, are missing."
    ),
    "verl.trainer.ppo.rollout_corr_helper.compute_is_metrics": _CORRECTION,
    "verl.trainer.ppo.rollout_corr_helper.compute_rs_metrics": _CORRECTION,
    "verl.trainer.ppo.rollout_corr_helper.compute_rollout_corr_metrics_from_logprobs": _CORRECTION,
    "verl.trainer.ppo.v1": _QUEUE_TRAINER,
    "verl.utils.dataset.multiturn_sft_dataset.convert_nested_value_to_list_recursive": _PRIVATE,
    "verl.utils.dataset.multiturn_sft_dataset.once": _PRIVATE,
    "verl.utils.dataset.multiturn_sft_dataset.print_assembled_message": _PRIVATE,
    "verl.utils.dataset.multiturn_sft_dataset.get_rope_index": _VISION,
    "verl.utils.dataset.multiturn_sft_dataset.process_video": _VISION,
    "verl.utils.dataset.rl_dataset.build_multimodal_processor_inputs": _VISION,
    "verl.utils.dataset.rl_dataset.RLHFDataset.process_multi_modal_info": _VISION,
    "verl.utils.model.CausalLMOutputForPPO": _NO_PATCHES,
    "verl.utils.model.ModelRegistry": _NO_PATCHES,
    "verl.utils.model.create_huggingface_critic": _VALUE_HEAD,
    "verl.utils.model.load_valuehead_model": _VALUE_HEAD,
    "verl.utils.model.patch_valuehead_model": _VALUE_HEAD,
    "verl.utils.model.get_hf_model_path": _MEGATRON,
    "verl.utils.model.get_parallel_gptmodel_from_config": _MEGATRON,
    "verl.utils.model.get_parallel_model_from_config": _MEGATRON,
    "verl.utils.model.load_mcore_dist_weights": _MEGATRON,
    "verl.utils.model.load_megatron_gptmodel_weights": _MEGATRON,
    "verl.utils.model.load_megatron_model_weights": _MEGATRON,
    "verl.utils.model.normalize_pp_vpp_params": _MEGATRON,
    "verl.utils.profiler.build_rollout_dist_profiler": _SERVERS_ON_RAY,
    "verl.utils.profiler.build_sglang_profiler_args": _SERVERS_ON_RAY,
    "verl.utils.profiler.build_vllm_profiler_args": _SERVERS_ON_RAY,
    "verl.utils.profiler.relocate_rollout_traces": _SERVERS_ON_RAY,
    "verl.utils.profiler.rollout_profiler_global_ranks": _SERVERS_ON_RAY,
    "verl.utils.profiler.rollout_trace_dir": _SERVERS_ON_RAY,
    "verl.utils.profiler.rollout_trace_local_rank": _SERVERS_ON_RAY,
    "verl.utils.rollout_skip.SkipAction": _SKIP,
    "verl.utils.rollout_skip.read_dumped_data": _SKIP,
    "verl.utils.rollout_skip.RolloutSkip.dump": _SKIP,
    "verl.utils.rollout_skip.RolloutSkip.is_dump_step": _SKIP,
    "verl.utils.rollout_skip.RolloutSkip.num_dumped_step": _SKIP,
    "verl.utils.rollout_skip.RolloutSkip.record": _SKIP,
    "verl.utils.rollout_skip.RolloutSkip.replace_curr_new_batch": _SKIP,
    "verl.utils.rollout_skip.RolloutSkip.step": _SKIP,
    "verl.utils.rollout_skip.RolloutSkip.try_load": _SKIP,
    "verl.utils.skip.AsyncRolloutSkip": _SKIP,
    "verl.utils.skip.BaseSkip": _SKIP,
    "verl.utils.skip.RolloutTqSkip": _SKIP,
    "verl.utils.skip.SkipManager": _SKIP,
    "verl.utils.skip.SkipManagerConfig": _SKIP,
    "verl.utils.tokenizer.build_multimodal_processor_inputs": _VISION,
    "verl.utils.torch_functional.logprobs_from_logits_flash_attn": _COMPILED,
    "verl.utils.torch_functional.use_original_torch_compile": _COMPILED,
    "verl.utils.torch_functional.logprobs_from_logits_torch_npu": _OTHER_DEVICES,
    "verl.utils.tracking.ClearMLLogger": _TRACKERS,
    "verl.utils.tracking.DapoFilteredRewardTableLogger": _TRACKERS,
    "verl.utils.tracking.FileLogger": _TRACKERS,
    "verl.utils.tracking.RLInsightLogger": _TRACKERS,
    "verl.workers.config.actor.MindSpeedActorConfig": _OTHER_DEVICES,
    "verl.workers.config.actor.MindSpeedCheckpointConfig": _OTHER_DEVICES,
    "verl.workers.config.actor.MindSpeedEngineConfig": _OTHER_DEVICES,
    "verl.workers.config.actor.TorchTitanActorConfig": _OTHER_DEVICES,
    "verl.workers.config.actor.TorchtitanEngineConfig": _OTHER_DEVICES,
    "verl.workers.config.actor.VeOmniActorConfig": _OTHER_DEVICES,
    "verl.workers.config.actor.VeOmniEngineConfig": _OTHER_DEVICES,
    "verl.workers.config.actor.McoreCheckpointConfig": Absence(
        "other design", "verl.workers.config.CheckpointConfig holds for all back ends."
    ),
    "verl.workers.config.actor.QATConfig": Absence("not yet", "Training of quantized weights is missing."),
    "verl.workers.config.rollout.DisaggregationConfig": _SERVERS_ON_RAY,
    "verl.workers.config.rollout.ServerConfig": _SERVERS_ON_RAY,
    "verl.workers.config.rollout.SkipConfig": _SKIP,
    "verl.workers.engine.base.BaseEngineCtx": Absence(
        "other design", "An engine's train_mode() and eval_mode() are context managers."
    ),
    "verl.workers.engine.base.get_vendor": _OTHER_DEVICES,
    "verl.workers.engine.base.maybe_fix_3d_position_ids": _VISION,
    "verl.workers.engine_workers.CheckpointEngineRegistry": _ASYNCHRONOUS,
    "verl.workers.engine_workers.TrainingWorkerConfig": Absence(
        "other design",
        "TrainingWorker takes the configuration of its run: verl.config.SFTConfig, RMConfig or DPOConfig.",
    ),
    "verl.workers.engine_workers.distillation_ppo_loss": _DIVERGENCES,
    "verl.workers.engine_workers.maybe_fix_3d_position_ids": _VISION,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.async_calls_finalize_fn_exec": _MEGATRON,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.load_pretrained_model": _MEGATRON,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.execute_checkpoint_engine": _ASYNCHRONOUS,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.rollout_mode": _RESHARDING,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.update_weights": _RESHARDING,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.set_loss_fn": _ACTOR,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.dump_memory_snapshot": _PROFILED,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.start_profile": _PROFILED,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.stop_profile": _PROFILED,
    "verl.workers.fsdp_workers.ActorRolloutRefWorker.to": Absence(
        "other design",
        "Models move by themselves, before and after they compute: fsdp_config.param_offload, optimizer_offload.",
    ),
}
"""Old address to the reason: of a module with all below it, of one name, or of an attribute of a class.

A package with a row of its own above other rows stands in ``verl/compat/old_paths`` too, because Python imports it
before what is below."""
