"""Keys of other versions of verl: unused here, spelled differently, or without successor.

``INACTIVE`` holds, for each section, keys that the YAML files contain because published scripts set them or refer to
them in ``${...}``. A value that differs from the default here is refused (``not_yet``) or logged (``no_effect``).
``ALIASES`` maps other spellings to keys; an alias of a section moves all its keys. ``RETIRED`` lists keys without a
successor: harmless values are dropped, others refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AgentLoopConfig,
    BaseConfig,
    CheckpointEngineConfig,
    CriticConfig,
    DataConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPCriticModelCfg,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    GlobalProfilerConfig,
    GlobalToolsConfig,
    HFModelConfig,
    JudgeRolloutConfig,
    MemoryHistoryConfig,
    ModelToolsConfig,
    ModuleConfig,
    MultiTurnConfig,
    PPOConfig,
    RefConfig,
    RewardModelConfig,
    RewardModelModelConfig,
    RewardProfilerConfig,
    RoleProfilerConfig,
    RolloutConfig,
    RouterReplayConfig,
    SFTDataConfig,
    TrainerConfig,
)


@dataclass(frozen=True)
class Inactive:
    """Keys of a section that no code reads, with one reason.

    Attributes:
        why: ``reason; remedy`` of a refusal, or the reason why a setting has no effect.
        keys: dotted key below the section → its default in the YAML files (a value or an interpolation).
        refused: whether another value is an error.
        is_spelling: whether the keys are other spellings, of the keys given in ``ALIASES`` or ``per_rank``.
        per_rank: key per rank that is derived from these keys, which count over all ranks.
    """

    why: str
    keys: Mapping[str, Any]
    refused: bool = False
    is_spelling: bool = False
    per_rank: str | None = None


def not_yet(why: str, keys: Mapping[str, Any]) -> Inactive:
    """Keys of features that this version lacks; a value other than the default is refused."""
    return Inactive(why, keys, refused=True)


def no_effect(why: str, keys: Mapping[str, Any]) -> Inactive:
    """Keys that are accepted without changing any result; setting one logs a warning."""
    return Inactive(why, keys)


def older_form(key: str, default: str | None = None) -> Inactive:
    """A micro-batch size in sequences over all ranks, from which ``{key}_per_gpu`` (per rank) is derived."""
    why = f"older form of {key}_per_gpu, in sequences over all ranks"
    return Inactive(why, {key: default}, is_spelling=True, per_rank=f"{key}_per_gpu")


def older_name(key: str, new: str) -> Inactive:
    """Another spelling (see ``ALIASES``) that the YAML files contain."""
    return Inactive(f"older name of {new}", {key: None}, is_spelling=True)


AGENT_LOOPS = (
    "conversations are led by agent loops; write one, and name it in "
    "actor_rollout_ref.rollout.agent.agent_loop_config_path"
)
_ALWAYS_FUSED = "log-probs and entropy always come from hidden states in slices, never from all logits at once"
_UNCOMPILED = "this version runs its small kernels uncompiled; results are the same"
_NO_TILED_MLP = (
    "the same numbers: a pass has at most the tokens of its budget (ppo_max_token_len_per_gpu), which bounds what its "
    "feed-forward layers hold, and ranks can share a longer sequence (ulysses_sequence_parallel_size)"
)
_NO_LIGER = (
    "the model's own layers give the same results, and what Liger saves most, all logits at once, is never made here"
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

INACTIVE: dict[type[BaseConfig], tuple[Inactive, ...]] = {
    RoleProfilerConfig: (not_yet(_ONE_PROFILER, _FOLLOWS_GLOBAL),),
    RewardProfilerConfig: (
        not_yet(
            "traces have what the other roles ask for; set actor_rollout_ref.actor.profiler.tool_config",
            {"tool_config": f"${{oc.select:{_ACTOR_PROFILER}.tool_config,null}}"},
        ),
    ),
    ModelToolsConfig: (
        not_yet(
            "all roles remember equally many allocations; set "
            "global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries",
            {"torch_memory.trace_alloc_max_entries": _MEMORY_ENTRIES},
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
    GlobalProfilerConfig: (
        not_yet("each step has files of its own; leave it false", {"profile_continuous_steps": False}),
    ),
    PPOConfig: (
        not_yet(
            "the transfer queue is not in this version; set transfer_queue.enable=false",
            {"transfer_queue.enable": False},
        ),
    ),
    ActorRolloutRefConfig: (
        not_yet(
            "a rollout engine on ranks of its own is not in this version; set hybrid_engine=true",
            {"hybrid_engine": True},
        ),
    ),
    HFModelConfig: (
        no_effect(_NO_LIGER, {"use_liger": False}),
        no_effect(_ALWAYS_FUSED, {"use_fused_kernels": False, "fused_kernel_options.impl_backend": "torch"}),
        no_effect(_NO_TILED_MLP, {"tiled_mlp.enabled": False, "tiled_mlp.num_shards": 4}),
        not_yet("multi-token prediction is not in this version; set mtp.enable=false", {"mtp.enable": False}),
        no_effect(
            "part of multi-token prediction, which is not in this version",
            {
                "mtp._target_": "verl.workers.config.MtpConfig",
                "mtp.enable_train": False,
                "mtp.enable_rollout": False,
                "mtp.detach_encoder": False,
                "mtp.mtp_loss_scaling_factor": 0.1,
                "mtp.speculative_algorithm": "EAGLE",
                "mtp.speculative_num_steps": 2,
                "mtp.speculative_eagle_topk": 2,
                "mtp.speculative_num_draft_tokens": 4,
                "mtp.method": "mtp",
                "mtp.num_speculative_tokens": 1,
            },
        ),
    ),
    ActorConfig: (
        older_form("ppo_micro_batch_size"),
        no_effect(
            "actor_rollout_ref.rollout.n decides how many responses a prompt gets",
            {"rollout_n": "${oc.select:actor_rollout_ref.rollout.n,1}"},
        ),
        no_effect(_UNCOMPILED, {"use_torch_compile": True}),
        no_effect(
            _ALWAYS_FUSED,
            {"use_fused_kernels": "${oc.select:actor_rollout_ref.model.use_fused_kernels,false}"},
        ),
    ),
    FSDPActorConfig: (
        no_effect(_ALWAYS_FUSED, {"entropy_from_logits_with_chunking": False, "entropy_checkpointing": False}),
        no_effect(
            "Σπ² is computed in slices and without a gradient, so that there is nothing to keep or to compute again",
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
    MultiTurnConfig: (no_effect("a conversation is repeated as rollout.n says", {"num_repeat_rollouts": None}),),
    AgentLoopConfig: (
        not_yet(
            "servers of your own are not in this version; write an agent loop (agent.agent_loop_config_path) instead",
            {"custom_async_server.path": None, "custom_async_server.name": None},
        ),
        no_effect(
            "part of servers of your own, which are not in this version",
            {"custom_async_server._target_": "verl.workers.config.CustomAsyncServerConfig"},
        ),
    ),
    RolloutConfig: (
        older_form("log_prob_micro_batch_size"),
        no_effect(
            "engines exchange token ids only; texts are made and looked for on the trainer's side",
            {"skip_tokenizer_init": True},
        ),
        no_effect("no response is cut off to save time: all of a batch are finished", {"over_sample_rate": 0}),
        no_effect("weights travel tensor by tensor already", {"layered_summon": False}),
        no_effect("engines always return log-probs and the gap is always logged", {"calculate_log_probs": False}),
        no_effect(_WITH_THE_ACTOR.partition(";")[0], {"profiler._target_": "verl.utils.profiler.ProfilerConfig"}),
        not_yet(
            _WITH_THE_ACTOR,
            {
                "profiler.enable": f"${{oc.select:{_ACTOR_PROFILER}.enable,false}}",
                **{f"profiler.{name}": value for name, value in _FOLLOWS_GLOBAL.items()},
                "profiler.all_ranks": f"${{oc.select:{_ACTOR_PROFILER}.all_ranks,false}}",
                "profiler.ranks": f"${{oc.select:{_ACTOR_PROFILER}.ranks,[]}}",
                "profiler.tool_config": f"${{oc.select:{_ACTOR_PROFILER}.tool_config,null}}",
            },
        ),
        not_yet(
            "quantized rollout is not in this version; leave rollout.quantization null",
            {"quantization": None},
        ),
        no_effect("part of quantized rollout, which is not in this version", {"quantization_config_file": None}),
        not_yet(
            "multi-token prediction is not in this version; leave it out",
            {"mtp": "${oc.select:actor_rollout_ref.model.mtp, null}"},
        ),
    ),
    CheckpointEngineConfig: (
        not_yet(
            "only the direct transfer (naive) is in this version; set checkpoint_engine.backend=naive",
            {"backend": "naive"},
        ),
        no_effect("the direct transfer has no settings", {"engine_kwargs": {}}),
    ),
    DataConfig: (
        older_name("tokenizer", "actor_rollout_ref.model.tokenizer_path"),
        no_effect(
            "the model's image processor has the size of a patch, and the data set always makes the inputs of images",
            {"image_patch_size": 14, "return_multi_modal_inputs": True},
        ),
        no_effect(
            "actor_rollout_ref.model.trust_remote_code holds for the tokenizer too",
            {"trust_remote_code": False},
        ),
        Inactive(
            "older name of actor_rollout_ref.rollout.multi_turn.tool_config_path",
            {"tool_config_path": "${oc.select:actor_rollout_ref.rollout.multi_turn.tool_config_path, null}"},
            is_spelling=True,
        ),
    ),
    SFTDataConfig: (older_form("micro_batch_size"),),
    CriticConfig: (older_form("ppo_micro_batch_size"),),
    FSDPCriticConfig: (older_form("forward_micro_batch_size", "${oc.select:.ppo_micro_batch_size,null}"),),
    FSDPCriticModelCfg: (no_effect(_NO_TILED_MLP, {"tiled_mlp.enabled": False, "tiled_mlp.num_shards": 4}),),
    RewardModelConfig: (
        older_form("micro_batch_size"),
        no_effect("reward managers are called by the driver in this version", {"use_reward_loop": True}),
        not_yet(
            "reward loops are not in this version; use reward_model.reward_manager",
            {"reward_loop_source": "register", "reward_loop_module_path": None, "reward_loop_class_name": None},
        ),
    ),
    JudgeRolloutConfig: (
        no_effect("the engine gets the weights from the worker that holds it", {"load_format": "auto"}),
        no_effect("a judge that the run serves reads texts", {"limit_images": None}),
        no_effect("the endpoint tokenizes, whatever the engine does", {"skip_tokenizer_init": False}),
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
        no_effect("Ray reports ranks that do not start", {"ray_wait_register_center_timeout": 300}),
        no_effect(
            "there is one implementation of the workers, whatever it says",
            {"use_legacy_worker_impl": "auto"},
        ),
    ),
}
"""Section → its inactive keys, which its subclasses have too."""


@dataclass(frozen=True)
class Alias:
    """Another spelling ``old`` of ``new`` (``key[i]`` is one item of a list); ``values`` maps old values to new."""

    old: str
    new: str
    values: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Retired:
    """Keys without successor: ``harmless`` values are dropped, others refused with ``reason; remedy``, or logged.

    Attributes:
        pattern: the key or section, as a shell pattern.
        refused: whether a value that is not harmless is an error; otherwise it has no effect, for this ``reason``.
    """

    pattern: str
    reason: str
    harmless: tuple[Any, ...] = (None, False, [], {})
    refused: bool = True


def _of_optimizer(optim: str) -> tuple[Alias, ...]:
    return (
        Alias(f"{optim}.beta1", f"{optim}.betas[0]"),
        Alias(f"{optim}.beta2", f"{optim}.betas[1]"),
        Alias(f"{optim}.warmup_style", f"{optim}.lr_scheduler_type"),
        Alias(f"{optim}.lr_scheduler", f"{optim}.lr_scheduler_type"),
        Alias(f"{optim}.lr_decay_style", f"{optim}.lr_scheduler_type"),
        Alias(f"{optim}.warmup_steps_ratio", f"{optim}.lr_warmup_steps_ratio"),
    )


ALIASES: tuple[Alias, ...] = (
    *_of_optimizer("actor_rollout_ref.actor.optim"),
    *_of_optimizer("critic.optim"),
    *_of_optimizer("optim"),
    Alias(
        "algorithm.policy_loss_fn",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        {"ppo": "vanilla", "grpo": "vanilla"},
    ),
    Alias("algorithm.kl_ctl.init_kl_coef", "algorithm.kl_ctrl.kl_coef"),
    Alias("algorithm.kl_ctl", "algorithm.kl_ctrl"),
    Alias("actor_rollout_ref.actor.policy_loss.rollout_correction", "algorithm.rollout_correction"),
    Alias("data.chat_template", "actor_rollout_ref.model.custom_chat_template"),
    Alias("actor_rollout_ref.model.torch_dtype", "actor_rollout_ref.actor.fsdp_config.model_dtype"),
    Alias("data.tokenizer", "actor_rollout_ref.model.tokenizer_path"),
    *(
        Alias(old, "actor_rollout_ref.rollout.multi_turn.tool_config_path")
        for old in ("data.tool_config_path", "actor_rollout_ref.rollout.tools", "tools")
    ),
    Alias("actor_rollout_ref.rollout.interactions", "actor_rollout_ref.rollout.multi_turn.interaction_config_path"),
    Alias("actor_rollout_ref.rollout.max_response_length", "data.max_response_length"),
    Alias("actor_rollout_ref.rollout.multi_turn.max_turns", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"),
    Alias(
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    Alias("actor_rollout_ref.actor.checkpoint.contents", "actor_rollout_ref.actor.checkpoint.save_contents"),
    Alias("critic.checkpoint.contents", "critic.checkpoint.save_contents"),
    Alias("reward_model.custom_reward_function", "custom_reward_function"),
    Alias("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"),
    Alias("reward_model.max_concurrent", "reward_model.reward_kwargs.max_concurrent"),
    Alias("reward_model.max_rpm", "reward_model.reward_kwargs.max_rpm"),
    Alias("reward_model.max_tpm", "reward_model.reward_kwargs.max_tpm"),
    Alias("reward_model.estimated_tokens_per_request", "reward_model.reward_kwargs.estimated_tokens_per_request"),
    Alias("reward_model.timeout", "reward_model.timeout_s"),
    Alias("reward.custom_reward_function", "custom_reward_function"),
    Alias("reward.reward_manager", "reward_manager"),
    Alias("reward.reward_model.model_path", "reward_model.model.path"),
    Alias("reward.reward_model", "reward_model"),
    Alias("reward", "reward_model"),
    Alias("trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    Alias("ray_init", "ray_kwargs.ray_init"),
    # the supervised trainer
    Alias("model.partial_pretrain", "model.path"),
    Alias("model.strategy", "engine.strategy"),
    Alias("model.fsdp_config.cpu_offload", "engine.offload_policy"),
    Alias("model.fsdp_config", "engine"),
    Alias("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"),
    Alias("use_remove_padding", "model.use_remove_padding"),
    Alias("data.multiturn.messages_key", "data.messages_key"),
    Alias("data.multiturn.tools_key", "data.tools_key"),
    Alias("data.multiturn.enable_thinking_key", "data.enable_thinking_key"),
    Alias("actor_rollout_ref.actor.policy_loss.rollout_correction", "algorithm.rollout_correction"),
    Alias("data.chat_template", "model.custom_chat_template"),
    Alias("trainer.checkpoint", "checkpoint"),
)

OLD_DEFAULTS: Mapping[str, tuple[Any, Any]] = {"trainer.resume_from_path": (False, None)}
"""Key → default of earlier versions, which public scripts still set, and the value that means the same now."""

OLD_CAP = (
    "this cap has moved; set algorithm.rollout_correction.rollout_is=token and "
    "algorithm.rollout_correction.rollout_is_threshold to the cap"
)
OLD_CORRECTION = (
    "these settings have a section of their own, with other values; set rollout_is (token, sequence), "
    "rollout_is_threshold, rollout_rs and rollout_rs_threshold in algorithm.rollout_correction"
)
NO_FIRE = "sampling the first token hot is not in this version; leave it out"

RETIRED: tuple[Retired, ...] = (
    Retired("actor_rollout_ref.rollout.multi_turn.completion_callback", AGENT_LOOPS),
    Retired("actor_rollout_ref.rollout.chat_scheduler", AGENT_LOOPS),
    Retired("actor_rollout_ref.rollout.use_fire_sampling", NO_FIRE),
    Retired(
        "actor_rollout_ref.rollout.sglang_rollout_mode",
        "actor_rollout_ref.rollout.mode decides whether the engine is a server",
        (None, "local"),
        refused=False,
    ),
    Retired(
        "actor_rollout_ref.rollout.server",
        "a request may take as long as the server works, and a server that hangs is replaced: see start_timeout_s, "
        "hang_timeout_s and answer_timeout_s in actor_rollout_ref.rollout.engine_kwargs",
        (None,),
        refused=False,
    ),
    Retired("actor_rollout_ref.actor.tis_imp_ratio_cap", OLD_CAP, (None, -1)),
    Retired("algorithm.rollout_is*", OLD_CORRECTION),
    Retired("algorithm.rollout_rs*", OLD_CORRECTION),
    Retired("*.fsdp_config.grad_offload", "gradients stay with their parameters; use param_offload=true instead"),
    Retired("trainer.use_v1", "there is one trainer; leave it out", (None, True, False)),
    Retired("trainer.v1.trainer_mode", "only the synchronous trainer is in this version; use sync", (None, "sync")),
    Retired("distillation", "distillation is not in this version; leave it out"),
    Retired("data.multiturn.enable", "data.messages_key chooses conversations", (None, True, False)),
)
