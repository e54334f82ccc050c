"""Configuration of the critic (the value model)."""

from __future__ import annotations

from typing import ClassVar

from verl.config.actor import LossAggMode, UpdateConfig
from verl.config.base import section, setting, subsection
from verl.config.megatron import DistributedModel, McoreEngineConfig
from verl.config.model import FSDPEngineConfig, FSDPOptimizerConfig, TrainedModelConfig
from verl.config.problems import check_update


@section
class FSDPCriticModelCfg(TrainedModelConfig):
    """The critic's model: a language model whose head outputs one number per token."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPCriticModelCfg"

    tokenizer_path: str | None = setting(
        "~/models/deepseek-llm-7b-chat",
        interpolation='${oc.select:actor_rollout_ref.model.path,"~/models/deepseek-llm-7b-chat"}',
        path=True,
        remote=True,
    )
    """Folder of the tokenizer, by default the actor's; both must use the same token ids."""
    external_lib: str | None = setting(None, interpolation="${oc.select:actor_rollout_ref.model.external_lib,null}")
    trust_remote_code: bool = setting(
        False, interpolation="${oc.select:actor_rollout_ref.model.trust_remote_code,false}"
    )
    lora_rank: int = setting(0, ge=0)
    """Rank of the LoRA adapters that are trained, with the head, instead of the model's weights; 0 trains all weights.
    """
    lora_adapter_path: str | None = setting(None, path=True, remote=True)
    """Folder of a critic's trained adapters and head to continue from; rank and layers are read from its config."""
    fsdp_config: FSDPEngineConfig = subsection(FSDPEngineConfig)
    """Sharding, precision, offload."""


@section
class CriticConfig(UpdateConfig):
    """One update of the value model: batches, loss, optimizer."""

    enable: bool | None = setting(None)
    """Train a critic; null trains one if the advantage estimator reads values."""
    ppo_mini_batch_size: int = setting(
        256, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}"
    )
    ppo_micro_batch_size_per_gpu: int | None = setting(
        None, ge=1, interpolation="${oc.select:.ppo_micro_batch_size,null}"
    )
    use_dynamic_bsz: bool = setting(False, interpolation="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}")
    ppo_max_token_len_per_gpu: int = setting(32768, ge=1)
    forward_max_token_len_per_gpu: int = setting(32768, ge=1, interpolation="${.ppo_max_token_len_per_gpu}")
    """Tokens per pass on one rank when values are computed without an update."""
    ppo_epochs: int = setting(1, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_epochs,1}")
    shuffle: bool = setting(False, interpolation="${oc.select:actor_rollout_ref.actor.shuffle,false}")
    cliprange_value: float = setting(0.5, ge=0)
    """Largest change of a value from its old one before its gradient stops."""
    loss_agg_mode: LossAggMode = setting(
        "token-mean", interpolation="${oc.select:actor_rollout_ref.actor.loss_agg_mode,token-mean}"
    )
    use_prefix_grouper: bool = setting(False)
    """Compute a prompt once for all its responses in a pass, in updates and values (docs/speed_and_memory.md)."""
    optim: FSDPOptimizerConfig = subsection(FSDPOptimizerConfig, lr=1e-5)

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
    """Sequences per pass on one rank when values are computed without an update."""
    grad_clip: float = setting(1.0, gt=0)
    """Maximum gradient norm of one step."""
    ulysses_sequence_parallel_size: int = setting(1, ge=1)
    """Ranks that share each sequence; the same setting as that of `model.fsdp_config`."""
    megatron: McoreEngineConfig = subsection(McoreEngineConfig)
    """With `strategy=megatron`; sizes that are not set are the actor's."""

    @property
    def placement(self) -> FSDPEngineConfig | McoreEngineConfig:
        """The section of the training back end."""
        return self.megatron if self.strategy == "megatron" else self.model.fsdp_config
