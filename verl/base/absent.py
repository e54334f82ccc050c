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
_MEGATRON = Absence("other design", "verl.workers.engine.megatron builds, trains and converts models.")
_VISION = Absence(
    "other design",
    "Images and videos in prompts are read by RLHFDataset and verl.vision (docs/images.md, docs/videos.md): "
    "verl.vision.videos.open_video chooses frames, and its frames() gives the pictures.",
)
_LORA = Absence(
    "other design",
    "Adapters are those of peft: verl.workers.engine.fsdp.adapters adds, merges and writes them, and an engine's "
    "get_per_tensor_param gives merged weights, its adapted_weights base and adapters apart. Each checkpoint has "
    "them in lora_adapter, for peft.",
)
_DISTILLATION = Absence("not yet", "Distillation from a teacher is missing.")

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
    "vLLM as rollout engine is one class, verl.workers.rollout.vllm_rollout.VLLMRollout, in this process or with a "
    "server (rollout.mode).",
)

_QUEUE = Absence("not yet", "The transfer queue is missing: batches travel as verl.DataProto; leave the decorator out.")
_TRACE = Absence(
    "other design",
    "Traces are made by the trainer, with rollout.trace.backend=otel, from what the loops return. "
    "VERL_LOGGING_LEVEL=DEBUG logs each call of a function under rollout_trace_op, with its time.",
)

_TRAINER = "verl.trainer.ppo.ray_trainer.RayPPOTrainer"

ABSENT: dict[str, Absence] = {
    "verl.checkpoint_engine": _ASYNCHRONOUS,
    "verl.distributed_engine": Absence(
        "other design", "Workers on many machines are verl.single_controller: worker groups and pools on Ray."
    ),
    "verl.experimental.agent_loop": _AGENTS,
    "verl.experimental.fully_async_policy": _ASYNCHRONOUS,
    "verl.experimental.one_step_off_policy": _ASYNCHRONOUS,
    "verl.experimental.reward_loop.RewardLoopManager": Absence(
        "other design",
        "Rewards are computed in processes of the reward manager: verl.trainer.ppo.reward.load_reward_manager; a "
        "reward model that scores is verl.workers.fsdp_workers.RewardModelWorker, one that is asked "
        "verl.judge.service.JudgeService.",
    ),
    "verl.experimental.reward_loop.migrate_legacy_reward_impl": Absence(
        "no use", "Reward settings are read in both spellings, reward.* and reward_model.*; leave the call out."
    ),
    "verl.experimental.separation": _ASYNCHRONOUS,
    "verl.experimental.teacher_loop": _DISTILLATION,
    "verl.llm_backends": Absence(
        "other design",
        "Models are those of Transformers (verl.utils.model), and rollout engines share the interface "
        "verl.workers.rollout.base.BaseRollout.",
    ),
    "verl.model_merger.lora_adapter": _LORA,
    "verl.models": Absence(
        "other design",
        "Models are those of Transformers, loaded by verl.utils.model and wrapped by verl.workers.engine.fsdp.model; "
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
    f"{_TRAINER}.checkpoint_manager": Absence(
        "other design", "The rollout engine takes new weights by itself when it generates; leave the call out."
    ),
    f"{_TRAINER}.llm_server_manager": _ASYNCHRONOUS,
    f"{_TRAINER}.tq_client": _QUEUE,
    f"{_TRAINER}.use_legacy_worker_impl": Absence("no use", "There is one implementation of the workers."),
    f"{_TRAINER}._create_worker_classes": Absence(
        "other design", "Override worker_arguments, or write init_workers (docs/recipes.md)."
    ),
    f"{_TRAINER}._init_worker_groups": Absence(
        "other design", "Override start_workers, or write init_workers (docs/recipes.md)."
    ),
    f"{_TRAINER}._init_resource_pools": Absence(
        "other design", "The pools are made by resource_pool_manager.create_resource_pool()."
    ),
    "verl.trainer.histoSpec": Absence("no use", "It is a module of one project's own copy of verl."),
    "verl.utils.checkpoint.megatron_checkpoint_manager": _MEGATRON,
    "verl.utils.config.ConfigManager": Absence(
        "other design", "verl.trainer.config.load_config checks a configuration and makes typed sections of it."
    ),
    "verl.utils.config.ConfigParser": Absence(
        "other design", "verl.trainer.config.load_config checks a configuration and makes typed sections of it."
    ),
    "verl.utils.dataset.rl_dataset.RLHFDataset.dataframe": Absence(
        "other design", "Rows are read by source_row(item), columns by source_column(name)."
    ),
    "verl.utils.dataset.rl_dataset.RLHFDataset.maybe_filter_out_long_prompts": Absence(
        "other design", "Prompts are filtered when a data set is made, by filter_overlong_prompts of its config."
    ),
    "verl.utils.dataset.rl_dataset.RLHFDataset.process_vision_info": _VISION,
    "verl.utils.dataset.vision_utils.process_multi_modal_inputs_for_minicpmo": _VISION,
    "verl.utils.dataset.vision_utils.process_video": _VISION,
    "verl.utils.dataset.rl_dataset.RLHFDataset.resume_dataset_state": Absence(
        "no use", "A data set that was pickled has all of its rows and opens its files by itself; leave the call out."
    ),
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
        "logits at once (verl.workers.engine.fsdp.head).",
    ),
    "verl.utils.logger.aggregate_logger.AggregateLogger": Absence(
        "other design", "verl.utils.tracking.Tracking sends metrics to several trackers at once."
    ),
    "verl.utils.megatron": _MEGATRON,
    "verl.utils.megatron_utils": _MEGATRON,
    "verl.utils.model.load_valuehead_model": Absence(
        "other design", "verl.workers.engine.fsdp.model.build_model('value_model', ...) puts the head on a model."
    ),
    "verl.utils.model.normalize_model_name": _MEGATRON,
    "verl.utils.py_functional.DynamicEnum": Absence(
        "other design",
        "Dispatch modes are added by verl.single_controller.base.decorator.register_dispatch_mode; a set of names of "
        "your own is an enum.Enum.",
    ),
    "verl.utils.torch_functional.postprocess_data": Absence(
        "other design", "verl.utils.torch_functional.pad_sequence_to_length pads; the data set cuts (data.truncation)."
    ),
    "verl.utils.profiler.config.NPUToolConfig": Absence("not yet", "Ascend devices are missing; use tool=torch."),
    "verl.utils.profiler.mstx_profile": Absence("not yet", "Ascend devices are missing; use tool=torch."),
    "verl.utils.profiler.profile.Profiler": Absence(
        "other design", "verl.utils.profiler.DistProfiler with tool=torch runs PyTorch's profiler."
    ),
    "verl.utils.rollout_skip": Absence(
        "other design", "RayPPOTrainer reads and writes stored rollouts itself, with rollout.skip_rollout=true."
    ),
    "verl.utils.rollout_trace.RolloutTraceConfig": _TRACE,
    "verl.utils.rollout_trace.rollout_trace_attr": _TRACE,
    "verl.utils.transferqueue_utils": _QUEUE,
    "verl.utils.vllm.patch": Absence(
        "no use", "verl.workers.rollout.vllm_rollout loads weights by vLLM's own loader, without a patch."
    ),
    "verl.workers.actor": _ACTOR,
    "verl.workers.config.DistillationConfig": _DISTILLATION,
    "verl.workers.critic": _ACTOR,
    "verl.workers.engine_workers_tinker": Absence(
        "other design",
        "A worker that trains on given batches with given losses is verl.workers.training_workers.TrainingWorker "
        "(set_loss_fn, train_batch).",
    ),
    "verl.workers.engine_workers.TrainingWorker.train_mini_batch": Absence(
        "other design",
        "Mini-batches are cut before they are dealt to ranks, so that any number of ranks makes the same steps: call "
        "train_batch for each part of DataProto.make_iterator or DataProto.split.",
    ),
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
    "verl.workers.rollout.schemas": _AGENTS,
    "verl.workers.rollout.utils": _ASYNCHRONOUS,
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": _OTHER_ENGINE_CLASSES,
    "verl.workers.rollout.vllm_rollout.utils": _OTHER_ENGINE_CLASSES,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _ASYNCHRONOUS,
    "verl.workers.rollout.vllm_rollout.vllm_rollout.ServerAdapter": _OTHER_ENGINE_CLASSES,
    "verl.workers.sharding_manager": _RESHARDING,
    "verl.workers.utils.losses": _ACTOR,
}
"""Old address to the reason: of a module with all below it, of one name, or of an attribute of a class.

A module whose other names are here needs ``__getattr__ = old_names(__name__)`` (:mod:`verl.base.doors`), and so does
a package with a row of its own above other rows: it stands in ``verl/compat``, for Python imports it before what is
below."""
