"""The value model."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from verl.base_config import BaseConfig, section, setting, subsection
from verl.utils.profiler.config import PART_OF_PROFILING, ProfilerConfig
from verl.workers.config.actor import LossAggMode
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.config.engine import NO_MEGATRON, NO_ULYSSES, FSDPEngineConfig, Strategy
from verl.workers.config.model import NO_LORA, NO_OFFLOAD, NO_SHM, PART_OF_LORA, TiledMlpConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig


@section
class FSDPCriticModelCfg(BaseConfig):
    """The critic's model: a language model whose head gives one number per token."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPCriticModelCfg"

    path: str = setting("~/models/deepseek-llm-7b-chat", path=True)
    """Folder of the model, or its name on the Hugging Face hub."""
    tokenizer_path: str | None = setting(
        "~/models/deepseek-llm-7b-chat",
        interpolation='${oc.select:actor_rollout_ref.model.path,"~/models/deepseek-llm-7b-chat"}',
        path=True,
    )
    """Folder of the tokenizer, by default the actor's: both must read the same token ids."""
    override_config: dict[str, Any] = setting(factory=dict)
    """Values that replace entries of the model's config."""
    external_lib: str | None = setting(None, interpolation="${oc.select:actor_rollout_ref.model.external_lib,null}")
    """Module that every worker imports before it loads the model."""
    trust_remote_code: bool = setting(
        False, interpolation="${oc.select:actor_rollout_ref.model.trust_remote_code,false}"
    )
    """Run Python code that comes with the model."""
    use_shm: bool = setting(False, refuse=NO_SHM)
    """Copy the model into shared memory before loading."""
    enable_gradient_checkpointing: bool = setting(True)
    """Keep only each layer's input and compute the rest again in the backward pass."""
    enable_activation_offload: bool = setting(False, refuse=NO_OFFLOAD)
    """Move the kept activations to host memory."""
    use_remove_padding: bool = setting(False)
    """Pack sequences one after the other, so that no time goes into padding."""
    lora_rank: int = setting(0, ge=0, refuse=NO_LORA)
    """Rank of the LoRA adapter; 0 trains all parameters."""
    lora_alpha: int = setting(16, ge=1, hint=PART_OF_LORA)
    """Scale of the LoRA adapter."""
    target_modules: Annotated[tuple[str, ...] | str, "module names"] = setting("all-linear", hint=PART_OF_LORA)
    """Layers that get an adapter."""
    tiled_mlp: TiledMlpConfig = subsection(TiledMlpConfig, hint="part of the tiled MLP, which is not in this version")
    """Feed-forward layers in slices."""
    fsdp_config: FSDPEngineConfig = subsection(FSDPEngineConfig)
    """Sharding, precision, offload."""


@section
class CriticConfig(BaseConfig):
    """One update of the value model: batches, loss, optimizer."""

    strategy: Strategy = setting("fsdp", refuse_values=NO_MEGATRON)
    """Training back end; `fsdp` and `fsdp2` are both served by FSDP2."""
    enable: bool | None = setting(None)
    """Train a critic; null does so where the advantage estimator reads values."""
    rollout_n: int = setting(1, ge=1, interpolation="${oc.select:actor_rollout_ref.rollout.n,1}")
    """Responses per prompt, as in `rollout.n`."""
    ppo_mini_batch_size: int = setting(
        256, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}"
    )
    """Prompts per optimizer step over all ranks; each brings its `rollout.n` responses."""
    ppo_micro_batch_size: int | None = setting(None, ge=1)
    """Older form of `ppo_micro_batch_size_per_gpu`: sequences per pass over all ranks together."""
    ppo_micro_batch_size_per_gpu: int | None = setting(
        None, ge=1, interpolation="${oc.select:.ppo_micro_batch_size,null}"
    )
    """Sequences per forward and backward pass on one rank."""
    use_dynamic_bsz: bool = setting(False, interpolation="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}")
    """Fill passes by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: int = setting(32768, ge=1)
    """Tokens per pass on one rank, with `use_dynamic_bsz`."""
    forward_max_token_len_per_gpu: int = setting(32768, ge=1, interpolation="${.ppo_max_token_len_per_gpu}")
    """Tokens per pass where values are only computed."""
    ppo_epochs: int = setting(1, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_epochs,1}")
    """Passes over the batch of a step."""
    shuffle: bool = setting(False, interpolation="${oc.select:actor_rollout_ref.actor.shuffle,false}")
    """Shuffle the batch before it is cut into mini-batches."""
    data_loader_seed: int = setting(42, ge=0)
    """Seed of that shuffle."""
    cliprange_value: float = setting(0.5, ge=0)
    """How far a value may move from its old one before its gradient stops."""
    loss_agg_mode: LossAggMode = setting(
        "token-mean", interpolation="${oc.select:actor_rollout_ref.actor.loss_agg_mode,token-mean}"
    )
    """How per-token losses become one number; all denominators are global."""
    optim: FSDPOptimizerConfig = subsection(lambda: FSDPOptimizerConfig(lr=1e-5))
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = subsection(CheckpointConfig)
    """What a checkpoint holds."""
    profiler: ProfilerConfig = subsection(ProfilerConfig, hint=PART_OF_PROFILING)
    """Profiling of the critic's workers."""


@section
class FSDPCriticConfig(CriticConfig):
    """A critic trained under FSDP."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPCriticConfig"

    model: FSDPCriticModelCfg = subsection(FSDPCriticModelCfg)
    """The critic's model."""
    forward_micro_batch_size: int | None = setting(None, ge=1, interpolation="${oc.select:.ppo_micro_batch_size,null}")
    """Older form of `forward_micro_batch_size_per_gpu`: sequences per pass over all ranks together."""
    forward_micro_batch_size_per_gpu: int | None = setting(
        None, ge=1, interpolation="${oc.select:.ppo_micro_batch_size_per_gpu,null}"
    )
    """Sequences per pass where values are only computed."""
    ulysses_sequence_parallel_size: int = setting(1, ge=1, refuse=NO_ULYSSES)
    """Ranks that share one sequence."""
    grad_clip: float = setting(1.0, gt=0)
    """Largest norm of the gradient of one step."""
