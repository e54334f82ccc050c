"""Sections under the import path ``verl.trainer.config.config``, which ``_target_`` of published YAML files names."""

from verl.config import CheckpointConfig as CheckpointConfig
from verl.config import CustomRewardFunctionConfig as CustomRewardFunctionConfig
from verl.config import ModuleConfig as ModuleConfig
from verl.config import RewardManagerConfig as RewardManagerConfig
