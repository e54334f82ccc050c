"""The configuration: typed sections, YAML made from them, loading and checking."""

from verl.trainer.config.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig
from verl.trainer.config.config import CheckpointConfig, CustomRewardFunctionConfig, ModuleConfig, RewardManagerConfig
from verl.trainer.config.data import DataConfig, PreferenceDataConfig
from verl.trainer.config.evaluation import EvalConfig
from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.load import load_config
from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.sft import SFTConfig, SFTDataConfig
from verl.trainer.config.trainer import SFTTrainerConfig, TrainerConfig

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
