"""Keys and keywords of other versions of verl that sections take and that no code here reads.

A value that differs from the default here is refused (``not_yet``) or logged (``no_effect``).
"""

from __future__ import annotations

from collections.abc import Mapping

from verl.config.actor import ActorConfig, FSDPActorConfig, McoreActorConfig, RefConfig, RouterReplayConfig
from verl.config.agent import AgentLoopConfig, MultiTurnConfig
from verl.config.asynchronous import OffPolicySamplerConfig, SeparateAsyncConfig, V1Config
from verl.config.base import ANY, INACTIVE, KEYWORDS, BaseConfig, Inactive
from verl.config.critic import CriticConfig, FSDPCriticConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationLossConfig, DistillationTeacherModelConfig, TeacherInferenceConfig
from verl.config.model import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    OptimizerConfig,
    TrainedModelConfig,
    WrapPolicyConfig,
)
from verl.config.observation import TraceConfig
from verl.config.ppo import PPOConfig
from verl.config.profiler import (
    GlobalProfilerConfig,
    GlobalToolsConfig,
    MemoryHistoryConfig,
    ModelToolsConfig,
    RewardProfilerConfig,
    RoleProfilerConfig,
)
from verl.config.reward import JudgeRolloutConfig, ModuleConfig, RewardModelConfig, RewardModelModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.sft import SFTDataConfig
from verl.config.trainer import TrainerConfig


def not_yet(why: str, keys: Mapping[str, object]) -> Inactive:
    """Keys of features that this version lacks; a value other than the default is refused."""
    return Inactive(why, keys, refused=True)


def no_effect(why: str, keys: Mapping[str, object]) -> Inactive:
    """Keys that are accepted without changing any result; setting one logs a warning."""
    return Inactive(why, keys)


def older_form(key: str, default: str | None = None) -> Inactive:
    """A micro-batch size in sequences over all ranks, from which ``{key}_per_gpu`` (per rank) is derived."""
    why = f"older form of {key}_per_gpu, in sequences over all ranks"
    return Inactive(why, {key: default}, is_spelling=True, per_rank=f"{key}_per_gpu")


def older_name(key: str, new: str) -> Inactive:
    """Another spelling (see ``ALIASES``) that the YAML files contain."""
    new_name = None if "." in new else new
    return Inactive(f"older name of {new}", {key: None}, is_spelling=True, new_name=new_name)


AGENT_LOOPS = (
    "conversations are led by agent loops; write one, and name it in "
    "actor_rollout_ref.rollout.agent.agent_loop_config_path"
)
NO_QUEUE = "samples go from the rollout engines to the trainer's own process, which keeps and saves those under way"
_ALWAYS_FUSED = "log-probs and entropy always come from hidden states in slices, never from all logits at once"
_UNCOMPILED = "this version runs its small kernels uncompiled; results are the same"
_NO_TILED_MLP = (
    "the same numbers: a pass has at most the tokens of its budget (ppo_max_token_len_per_gpu), which bounds what its "
    "feed-forward layers hold, and ranks can share a longer sequence (ulysses_sequence_parallel_size)"
)
_ONE_PROFILER = (
    "all roles are profiled by one tool into one folder; set global_profiler.tool and global_profiler.save_path"
)
_WITH_THE_ACTOR = "the rollout engine runs in the actor's processes; set actor_rollout_ref.actor.profiler"
_NOT_HERE = "part of profilers that are not in this version"
_WHOLE_STACKS = "PyTorch remembers whole stacks"

_REFERENCE_ROUTING = {
    "router_replay.mode": "disabled",
    "router_replay.record_file": None,
    "router_replay.replay_file": None,
}
_NO_ROUTING_FILES = "choices of routers are not written to files; leave it null"
_FREE_REFERENCE = "the reference always routes by itself; leave it disabled"
_MEMORY = "global_profiler.global_tool_config.torch_memory"
_ACTOR_PROFILER = "actor_rollout_ref.actor.profiler"
_FOLLOWS_GLOBAL = {
    "tool": "${oc.select:global_profiler.tool,null}",
    "save_path": "${oc.select:global_profiler.save_path,null}",
}
_MEMORY_ENTRIES = f"${{oc.select:{_MEMORY}.trace_alloc_max_entries,100000}}"
_NSYS_OPTIONS = {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": True, "cuda-graph-trace": "graph"}

_TABLE: dict[type[BaseConfig], tuple[Inactive, ...]] = {
    RoleProfilerConfig: (no_effect(_ONE_PROFILER, _FOLLOWS_GLOBAL),),
    RewardProfilerConfig: (
        no_effect(
            "traces have the contents set for the other roles; set actor_rollout_ref.actor.profiler.tool_config",
            {"tool_config": f"${{oc.select:{_ACTOR_PROFILER}.tool_config,null}}"},
        ),
    ),
    ModelToolsConfig: (
        no_effect(
            "all roles record the same number of allocations; set "
            "global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries",
            {"torch_memory.trace_alloc_max_entries": _MEMORY_ENTRIES},
        ),
        no_effect(
            "snapshots of all roles have the same number of steps; set "
            "global_profiler.global_tool_config.torch_memory.memory_snapshot_num_steps",
            {"torch_memory.memory_snapshot_num_steps": f"${{oc.select:{_MEMORY}.memory_snapshot_num_steps,1}}"},
        ),
        no_effect(
            _WHOLE_STACKS,
            {
                "torch_memory._target_": "verl.utils.profiler.config.TorchMemoryToolConfig",
                "torch_memory.stack_depth": f"${{oc.select:{_MEMORY}.stack_depth,32}}",
            },
        ),
        no_effect(
            _NOT_HERE,
            {
                "nsys._target_": "verl.utils.profiler.config.NsightToolConfig",
                "nsys.discrete": "${oc.select:global_profiler.global_tool_config.nsys.discrete}",
                "npu._target_": "verl.utils.profiler.config.NPUToolConfig",
                "npu.contents": [],
                "npu.level": "level0",
                "npu.analysis": True,
                "npu.discrete": False,
            },
        ),
    ),
    MemoryHistoryConfig: (
        no_effect(_WHOLE_STACKS, {"stack_depth": 32}),
        not_yet("PyTorch's recorder has no further arguments here; leave it empty", {"kw_args": {}}),
    ),
    GlobalToolsConfig: (
        no_effect(
            _NOT_HERE,
            {
                "nsys._target_": "verl.utils.profiler.config.NsightToolConfig",
                "nsys.discrete": False,
                "nsys.controller_nsight_options": _NSYS_OPTIONS,
                "nsys.worker_nsight_options": {
                    **_NSYS_OPTIONS,
                    "capture-range": "cudaProfilerApi",
                    "capture-range-end": None,
                    "kill": "none",
                },
            },
        ),
    ),
    GlobalProfilerConfig: (no_effect("each step has separate files", {"profile_continuous_steps": False}),),
    PPOConfig: (no_effect(NO_QUEUE, {"transfer_queue.enable": False}),),
    V1Config: (no_effect("this mode has no settings", {"sync": {}}),),
    SeparateAsyncConfig: (
        not_yet(
            "ranks of the trainer do not sample while they are idle; set it to false",
            {"hybrid_rollout.enable_switch": False},
        ),
        no_effect(
            "part of ranks that switch between training and sampling, which is not in this version",
            {
                "hybrid_rollout._target_": "verl.trainer.config.HybridRolloutSwitchConfig",
                "hybrid_rollout.switch_threshold_ratio": 0.4,
                "hybrid_rollout.adaptive_switch_threshold": True,
                "hybrid_rollout.switch_threshold_step_up": 0.05,
                "hybrid_rollout.switch_threshold_step_down": 0.03,
                "hybrid_rollout.switch_threshold_release_steps": 2,
                "hybrid_rollout.switch_cost_window_size": 3,
            },
        ),
    ),
    OffPolicySamplerConfig: (
        not_yet(
            "finished samples are taken in the order in which they started; use data.sampler for the order of prompts",
            {"custom_sampler.path": None, "custom_sampler.name": None, "sampler_kwargs": {}},
        ),
        no_effect(
            "actor_rollout_ref.rollout.agent.on_failure says what becomes of a failed conversation",
            {"sync_refill_failed_groups": False},
        ),
    ),
    TrainedModelConfig: (no_effect(_NO_TILED_MLP, {"tiled_mlp.enabled": False, "tiled_mlp.num_shards": 4}),),
    HFModelConfig: (
        no_effect(_ALWAYS_FUSED, {"use_fused_kernels": False, "fused_kernel_options.impl_backend": "torch"}),
    ),
    ActorConfig: (
        older_form("ppo_micro_batch_size"),
        no_effect(_UNCOMPILED, {"use_torch_compile": True}),
        no_effect(
            _ALWAYS_FUSED,
            {"use_fused_kernels": "${oc.select:actor_rollout_ref.model.use_fused_kernels,false}"},
        ),
    ),
    FSDPActorConfig: (
        no_effect(_ALWAYS_FUSED, {"entropy_from_logits_with_chunking": False, "entropy_checkpointing": False}),
        no_effect(
            "Σπ² is computed in slices and without a gradient, so there are no activations to store or recompute",
            {"sum_pi_squared_checkpointing": False},
        ),
    ),
    RefConfig: (
        older_form("log_prob_micro_batch_size"),
        no_effect(
            "actor_rollout_ref.rollout.n decides how many responses a prompt gets",
            {"rollout_n": "${oc.select:actor_rollout_ref.rollout.n,1}"},
        ),
        no_effect(
            _UNCOMPILED,
            {"use_torch_compile": "${oc.select:actor_rollout_ref.actor.use_torch_compile,true}"},
        ),
        not_yet(_FREE_REFERENCE, _REFERENCE_ROUTING),
        no_effect(
            "part of router replay, which the reference does not have",
            {"router_replay._target_": "verl.workers.config.RouterReplayConfig"},
        ),
        no_effect(_ALWAYS_FUSED, {"entropy_from_logits_with_chunking": False, "entropy_checkpointing": False}),
    ),
    RouterReplayConfig: (not_yet(_NO_ROUTING_FILES, {"record_file": None, "replay_file": None}),),
    FSDPEngineConfig: (
        no_effect("FSDP1 only; FSDP2 always keeps the original parameters", {"use_orig_params": False}),
        no_effect(_ALWAYS_FUSED, {"entropy_from_logits_with_chunking": False, "entropy_checkpointing": False}),
        no_effect(_UNCOMPILED, {"use_torch_compile": True}),
    ),
    FSDPOptimizerConfig: (older_name("warmup_style", "lr_scheduler_type"),),
    MultiTurnConfig: (
        no_effect("rollout.n decides how often a conversation is repeated", {"num_repeat_rollouts": None}),
    ),
    RolloutConfig: (
        older_form("log_prob_micro_batch_size"),
        no_effect(
            "engines exchange only token ids; the trainer decodes texts and detects stop texts",
            {"skip_tokenizer_init": True},
        ),
        no_effect("no response is cut to save time: all responses of a batch are finished", {"over_sample_rate": 0}),
        no_effect("weights are always sent tensor by tensor", {"layered_summon": False}),
        no_effect("engines always return log-probs and the gap is always logged", {"calculate_log_probs": False}),
        no_effect(
            _WITH_THE_ACTOR,
            {
                "profiler._target_": "verl.utils.profiler.ProfilerConfig",
                "profiler.enable": f"${{oc.select:{_ACTOR_PROFILER}.enable,false}}",
                **{f"profiler.{name}": value for name, value in _FOLLOWS_GLOBAL.items()},
                "profiler.all_ranks": f"${{oc.select:{_ACTOR_PROFILER}.all_ranks,false}}",
                "profiler.ranks": f"${{oc.select:{_ACTOR_PROFILER}.ranks,[]}}",
                "profiler.tool_config": f"${{oc.select:{_ACTOR_PROFILER}.tool_config,null}}",
            },
        ),
        not_yet(
            "a rollout pool keeps the number of ranks with which it started, because calls and transfers of weights "
            "are for all of them as one group; set rollout.nnodes and start the run again to use more nodes",
            {"elastic": False},
        ),
        not_yet(
            "routers are not plug-ins: a conversation stays with the engine that has its keys and values, and a new "
            "one goes to the engine with the fewest requests (verl.serving.router); leave it null",
            {"router_config_path": None},
        ),
        not_yet(
            "weights are rounded by the rule of rollout.quantization (fp8, int8) alone; leave it out",
            {"quantization_config_file": None},
        ),
        not_yet(
            "the rollout uses the heads of the model; set actor_rollout_ref.model.mtp, and leave this out",
            {"mtp": "${oc.select:actor_rollout_ref.model.mtp, null}"},
        ),
    ),
    DataConfig: (
        older_name("tokenizer", "actor_rollout_ref.model.tokenizer_path"),
        no_effect(
            "the model's image processor has the size of a patch, and the data set always makes the inputs of images",
            {"image_patch_size": 14, "return_multi_modal_inputs": True},
        ),
        no_effect(
            "actor_rollout_ref.model.trust_remote_code applies to the tokenizer too",
            {"trust_remote_code": False},
        ),
        Inactive(
            "older name of actor_rollout_ref.rollout.multi_turn.tool_config_path",
            {"tool_config_path": "${oc.select:actor_rollout_ref.rollout.multi_turn.tool_config_path, null}"},
            is_spelling=True,
        ),
        Inactive(
            "other name of actor_rollout_ref.rollout.multi_turn.function_tool_path",
            {"function_tool_path": "${oc.select:actor_rollout_ref.rollout.multi_turn.function_tool_path, null}"},
            is_spelling=True,
        ),
    ),
    SFTDataConfig: (older_form("micro_batch_size"),),
    CriticConfig: (older_form("ppo_micro_batch_size"),),
    FSDPCriticConfig: (older_form("forward_micro_batch_size", "${oc.select:.ppo_micro_batch_size,null}"),),
    RewardModelConfig: (
        older_form("micro_batch_size"),
        no_effect("reward managers are called by the driver in this version", {"use_reward_loop": True}),
        not_yet(
            "reward loops are not in this version; use reward_model.reward_manager",
            {"reward_loop_source": "register", "reward_loop_module_path": None, "reward_loop_class_name": None},
        ),
    ),
    JudgeRolloutConfig: (
        no_effect("the engine receives the weights from its worker", {"load_format": "auto"}),
        no_effect("a judge that the run serves reads texts", {"limit_images": None}),
        no_effect("the endpoint tokenizes, whatever the engine does", {"skip_tokenizer_init": False}),
    ),
    TeacherInferenceConfig: (
        no_effect("a teacher's weights are always those of its model_path", {"load_format": "auto"}),
        no_effect("a teacher reads the images of the policy's prompts", {"limit_images": None}),
        no_effect("teachers read and return token ids", {"skip_tokenizer_init": True}),
    ),
    DistillationTeacherModelConfig: (
        no_effect("all ranks of the teachers have engines of each of them, which work in turn", {"num_replicas": 0}),
    ),
    DistillationLossConfig: (
        no_effect(
            "divergences are always computed in chunks of tokens",
            {"use_chunked_topk": False, "chunked_topk_chunk_size": 4096},
        ),
    ),
    ModuleConfig: (no_effect("reward_manager.name names the class", {"name": "custom_reward_manager"}),),
    RewardModelModelConfig: (
        no_effect(_ALWAYS_FUSED, {"use_fused_kernels": "${actor_rollout_ref.model.use_fused_kernels}"}),
    ),
    TrainerConfig: (
        not_yet(
            "saving before an instance expires is not in this version; use trainer.save_freq",
            {"esi_redundant_time": 0},
        ),
        not_yet("steps to profile are a setting of the profiler; set global_profiler.steps", {"profile_steps": None}),
        no_effect(
            "there is one implementation of the workers, whatever it says",
            {"use_legacy_worker_impl": "auto"},
        ),
    ),
}
"""Section → its inactive keys, which its subclasses have too."""

_KEYWORDS: dict[type[BaseConfig], tuple[Inactive, ...]] = {
    ActorConfig: (
        no_effect(
            "passes without gradients have the sizes log_prob_* of the rollout section",
            {"ppo_infer_micro_batch_size_per_gpu": None, "ppo_infer_max_token_len_per_gpu": 16384},
        ),
        no_effect("workers read engine and model from their own sections", {"engine": ANY, "model_config": ANY}),
        no_effect("the section FSDPActorConfig has it", {"calculate_sum_pi_squared": False}),
        not_yet("training of quantized weights is not in this version; leave it out", {"qat": None}),
    ),
    FSDPActorConfig: (
        no_effect("old_log_probs and rollout_log_probs are separate columns", {"use_rollout_log_probs": False}),
        no_effect(_ALWAYS_FUSED, {"entropy_from_logits_chunk_size": 2048}),
        no_effect("sequences are packed, or padded to the longest", {"pad_to_length": False}),
    ),
    McoreActorConfig: (
        no_effect("weights are always loaded", {"load_weight": True}),
        no_effect("all roles are profiled by one tool", {"profile": {}}),
    ),
    FSDPCriticConfig: (no_effect("forward_micro_batch_size_per_gpu counts", {"forward_micro_batch_size": 1}),),
    AgentLoopConfig: (
        not_yet(
            "agent loops run the conversations; register your own agent loop, and leave it out",
            {"agent_loop_manager_class": None},
        ),
    ),
    TraceConfig: (no_effect("traces have the names of the run", {"project_name": None, "experiment_name": None}),),
    OptimizerConfig: (no_effect("grad_clip of the actor or critic counts", {"grad_clip": None}),),
    WrapPolicyConfig: (older_name("layer_class", "transformer_layer_cls_to_wrap"),),
    FSDPOptimizerConfig: (no_effect("null is its default, 0", {"min_lr_ratio": None, "init_lr_ratio": None}),),
    HFModelConfig: (
        no_effect(
            "files are copied, and tokenizer and model made, by what needs them (verl.utils.model)",
            {
                "local_path": None,
                "local_hf_config_path": None,
                "local_tokenizer_path": None,
                "load_tokenizer": True,
                "hf_config": None,
                "generation_config": None,
                "tokenizer": None,
                "processor": None,
                "architectures": None,
            },
        ),
    ),
    RolloutConfig: (
        no_effect(
            "gpu_memory_utilization counts on ranks of their own too", {"standalone_gpu_memory_utilization": None}
        ),
        not_yet("responses are sampled without it; leave it at 1", {"repetition_penalty": 1.0}),
        no_effect("responses depend on seed, step and sample alone", {"full_determinism": False}),
        not_yet("experts are shared by expert_parallel_size; leave it at 1", {"moe_tensor_parallel_size": 1}),
        no_effect("engine_kwargs has the time limits of servers", {"server": ANY}),
        no_effect("no code of verl reads it", {"custom": None}),
        not_yet("the trainer itself sends weights to the engine; leave it out", {"checkpoint_manager_class": None}),
        not_yet("stored rollouts are read with skip_rollout=true; leave it out", {"skip": None}),
        not_yet(_WITH_THE_ACTOR, {"profiler": None}),
        no_effect("names of weights come from the model", {"layer_name_map": {}}),
        no_effect("rollout.mode decides whether the engine is a server", {"sglang_engine_mode": "local"}),
        not_yet("the trainer logs the load of experts; leave it at 0", {"moe_load_balance_metrics_interval": 0}),
        no_effect("free_cache_engine decides whether the engine sleeps", {"enable_sleep_mode": True}),
        not_yet("quantized rollout is not in this version; leave it out", {"qat": None}),
        not_yet("prefill and decoding run in one engine; leave it out", {"disaggregation": None}),
    ),
}
"""Keywords of the public constructors that are no keys of the configuration here."""

INACTIVE.update(_TABLE)
KEYWORDS.update(_KEYWORDS)
