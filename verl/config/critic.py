"""Configuration of the critic (the value model)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from verl.config.actor import LossAggMode
from verl.config.base import BaseConfig, section, setting, subsection
from verl.config.megatron import DistributedModel, McoreEngineConfig
from verl.config.model import (
    ALL_LINEAR,
    NO_OTHER_BACK_END,
    CheckpointConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    LoRAConfig,
    ModuleNames,
    Strategy,
    pattern_problems,
)
from verl.config.problems import Problem, check_update
from verl.config.profiler import ModelProfilerConfig


@section
class FSDPCriticModelCfg(BaseConfig):
    """The critic's model: a language model whose head gives one number per token."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPCriticModelCfg"

    path: str = setting("~/models/deepseek-llm-7b-chat", path=True, remote=True)
    """Folder of the model, or its name on the Hugging Face hub."""
    tokenizer_path: str | None = setting(
        "~/models/deepseek-llm-7b-chat",
        interpolation='${oc.select:actor_rollout_ref.model.path,"~/models/deepseek-llm-7b-chat"}',
        path=True,
        remote=True,
    )
    """Folder of the tokenizer, by default the actor's: both must read the same token ids."""
    use_shm: bool = setting(False)
    """Read the files of this section from copies in shared memory (/dev/shm), made once on each machine if they fit."""
    override_config: dict[str, Any] = setting(factory=dict)
    """Values that replace entries of the model's config."""
    external_lib: str | None = setting(None, interpolation="${oc.select:actor_rollout_ref.model.external_lib,null}")
    """Module that every worker imports before it loads the model."""
    trust_remote_code: bool = setting(
        False, interpolation="${oc.select:actor_rollout_ref.model.trust_remote_code,false}"
    )
    """Run Python code that comes with the model."""
    enable_gradient_checkpointing: bool = setting(True)
    """Store only each layer's input and recompute the other activations in the backward pass."""
    enable_activation_offload: bool = setting(False)
    """Keep in CPU memory what the backward pass needs; with `enable_gradient_checkpointing` that is each layer's input.
    Slower, and less memory on a GPU."""
    use_remove_padding: bool = setting(False)
    """Pack sequences one after the other, so that no time goes into padding."""
    lora_rank: int = setting(0, ge=0)
    """Rank of the LoRA adapters that are trained with the head in place of the model's weights; 0 trains all."""
    lora_alpha: float = setting(16, gt=0)
    """Adapters are scaled by `lora_alpha` / `lora_rank`."""
    target_modules: ModuleNames = setting(ALL_LINEAR)
    """Layers that get adapters, as in `actor_rollout_ref.model`."""
    exclude_modules: ModuleNames | None = setting(None)
    """Layers without adapters."""
    lora_adapter_path: str | None = setting(None, path=True, remote=True)
    """Folder of trained adapters of a critic to go on from, with its head; rank and layers are those of its config."""
    lora: LoRAConfig = subsection(LoRAConfig)
    """Variants of LoRA."""
    fsdp_config: FSDPEngineConfig = subsection(FSDPEngineConfig)
    """Sharding, precision, offload."""

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters and the head are trained instead of all weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    def problems(self, path: str) -> Iterator[Problem]:
        """Layers are chosen by expressions that can be read."""
        chosen = {"target_modules": self.target_modules, "exclude_modules": self.exclude_modules}
        yield from pattern_problems(path, chosen)


@section
class CriticConfig(BaseConfig):
    """One update of the value model: batches, loss, optimizer."""

    strategy: Strategy = setting("fsdp", refuse_values=NO_OTHER_BACK_END)
    """Training back end; `fsdp` and `fsdp2` are both served by FSDP2, `megatron` by megatron-core."""
    enable: bool | None = setting(None)
    """Train a critic; null trains one if the advantage estimator reads values."""
    rollout_n: int = setting(1, ge=1, interpolation="${oc.select:actor_rollout_ref.rollout.n,1}")
    """Responses per prompt, as in `rollout.n`."""
    ppo_mini_batch_size: int = setting(
        256, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}"
    )
    """Prompts per optimizer step over all ranks; each brings its `rollout.n` responses."""
    ppo_micro_batch_size_per_gpu: int | None = setting(
        None, ge=1, interpolation="${oc.select:.ppo_micro_batch_size,null}"
    )
    """Sequences per forward and backward pass on one rank."""
    use_dynamic_bsz: bool = setting(False, interpolation="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}")
    """Fill passes by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: int = setting(32768, ge=1)
    """Tokens per pass on one rank, with `use_dynamic_bsz`."""
    forward_max_token_len_per_gpu: int = setting(32768, ge=1, interpolation="${.ppo_max_token_len_per_gpu}")
    """Tokens per pass on one rank where values are computed without an update."""
    ppo_epochs: int = setting(1, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_epochs,1}")
    """Passes over the batch of a step."""
    shuffle: bool = setting(False, interpolation="${oc.select:actor_rollout_ref.actor.shuffle,false}")
    """Take the mini-batches in a random order; which samples are in each does not change."""
    data_loader_seed: int = setting(42, ge=0)
    """Seed of that order."""
    cliprange_value: float = setting(0.5, ge=0)
    """How far a value may move from its old one before its gradient stops."""
    loss_agg_mode: LossAggMode = setting(
        "token-mean", interpolation="${oc.select:actor_rollout_ref.actor.loss_agg_mode,token-mean}"
    )
    """How per-token losses are aggregated to a scalar; all denominators are global."""
    use_prefix_grouper: bool = setting(False)
    """Compute a prompt once for all its responses in a pass, in updates and values (docs/shared_prompts.md)."""
    optim: FSDPOptimizerConfig = subsection(FSDPOptimizerConfig, lr=1e-5)
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = subsection(CheckpointConfig)
    """What a checkpoint holds."""
    profiler: ModelProfilerConfig = subsection(ModelProfilerConfig)
    """Ranks whose processes are profiled."""

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """Check this section by itself; see :meth:`verl.config.ActorConfig.validate`."""
        del n_gpus
        check_update(self.problems("critic"), "critic", self.ppo_mini_batch_size, train_batch_size)


@section
class FSDPCriticConfig(CriticConfig, DistributedModel):
    """A critic trained under FSDP."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPCriticConfig"

    model: FSDPCriticModelCfg = subsection(FSDPCriticModelCfg)
    """The critic's model."""
    forward_micro_batch_size_per_gpu: int | None = setting(
        None, ge=1, interpolation="${oc.select:.ppo_micro_batch_size_per_gpu,null}"
    )
    """Sequences per pass on one rank where values are computed without an update."""
    grad_clip: float = setting(1.0, gt=0)
    """Largest norm of the gradient of one step."""
    ulysses_sequence_parallel_size: int = setting(1, ge=1)
    """Ranks that share each sequence; the same setting as that of `model.fsdp_config`."""
    megatron: McoreEngineConfig = subsection(McoreEngineConfig)
    """With `strategy=megatron`; sizes that are not set are the actor's."""

    @property
    def placement(self) -> FSDPEngineConfig | McoreEngineConfig:
        """The section of the training back end."""
        return self.megatron if self.strategy == "megatron" else self.model.fsdp_config
