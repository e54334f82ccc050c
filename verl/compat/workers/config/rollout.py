"""Public address of :mod:`verl.config.rollout`."""

from verl.config.rollout import CheckpointEngineConfig as CheckpointEngineConfig
from verl.config.rollout import RolloutConfig as RolloutConfig
from verl.config.rollout import SamplingConfig as SamplingConfig
