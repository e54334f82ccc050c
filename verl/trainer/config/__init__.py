"""The sections of the configuration (from ``verl.config``) and ``load_config``, which checks and freezes them."""

from typing import TYPE_CHECKING

from verl.base.lazy import on_first_use
from verl.config import (
    AlgoConfig,
    CheckpointConfig,
    CustomRewardFunctionConfig,
    DataConfig,
    EvalConfig,
    FilterGroupsConfig,
    GenerationConfig,
    KLControlConfig,
    ModuleConfig,
    PPOConfig,
    PreferenceDataConfig,
    RewardManagerConfig,
    RolloutCorrectionConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
    TrainerConfig,
)

if TYPE_CHECKING:
    from verl.trainer.config.load import load_config

__all__ = [
    "AlgoConfig",
    "CheckpointConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "EvalConfig",
    "FilterGroupsConfig",
    "GenerationConfig",
    "KLControlConfig",
    "ModuleConfig",
    "PPOConfig",
    "PreferenceDataConfig",
    "RewardManagerConfig",
    "RolloutCorrectionConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "TrainerConfig",
    "load_config",
]

# The rules look at algorithms, data and rewards: they need torch and transformers.
__getattr__ = on_first_use(__name__, {"load_config": "verl.trainer.config.load"})
