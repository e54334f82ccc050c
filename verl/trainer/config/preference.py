"""The whole configurations of ``python -m verl.trainer.rm_trainer`` and ``python -m verl.trainer.dpo_trainer``."""

from __future__ import annotations

from verl.base_config import BaseConfig, section, subsection
from verl.trainer.config.config import RayConfig
from verl.trainer.config.data import PreferenceDataConfig
from verl.trainer.config.trainer import SFTTrainerConfig
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.config.engine import FSDPEngineConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig
from verl.workers.config.preference import (
    DirectPreferenceLossConfig,
    ReferenceModelConfig,
    RewardModelLossConfig,
)


@section
class PreferenceConfig(BaseConfig):
    """Training on pairs of a better and a worse response: data, model, optimizer, run."""

    data: PreferenceDataConfig = subsection(PreferenceDataConfig)
    """Pairs."""
    model: HFModelConfig = subsection(HFModelConfig)
    """The model that is trained."""
    engine: FSDPEngineConfig = subsection(FSDPEngineConfig)
    """Sharding, precision, offload."""
    optim: FSDPOptimizerConfig = subsection(lambda: FSDPOptimizerConfig(lr=1e-5, lr_scheduler_type="cosine"))
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = subsection(CheckpointConfig)
    """What a checkpoint holds."""
    trainer: SFTTrainerConfig = subsection(SFTTrainerConfig)
    """The run."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """How Ray is started."""


@section
class RMConfig(PreferenceConfig):
    """A reward model from preferences: data, model, loss, optimizer, run."""

    trainer: SFTTrainerConfig = subsection(
        lambda: SFTTrainerConfig(project_name="reward-model", experiment_name="test", total_epochs=1)
    )
    """The run."""
    loss: RewardModelLossConfig = subsection(RewardModelLossConfig)
    """What is minimised."""


@section
class DPOConfig(PreferenceConfig):
    """Direct preference optimisation: data, model, reference, loss, optimizer, run."""

    optim: FSDPOptimizerConfig = subsection(lambda: FSDPOptimizerConfig(lr=5e-7, lr_scheduler_type="cosine"))
    """Optimizer and schedule."""
    trainer: SFTTrainerConfig = subsection(
        lambda: SFTTrainerConfig(project_name="dpo", experiment_name="test", total_epochs=1)
    )
    """The run."""
    loss: DirectPreferenceLossConfig = subsection(DirectPreferenceLossConfig)
    """What is minimised."""
    ref: ReferenceModelConfig = subsection(ReferenceModelConfig)
    """The reference."""
