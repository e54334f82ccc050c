"""Public address of :mod:`verl.config.rollout`."""

from verl.config.agent import AgentLoopConfig as AgentLoopConfig
from verl.config.agent import MultiTurnConfig as MultiTurnConfig
from verl.config.observation import PrometheusConfig as PrometheusConfig
from verl.config.observation import TraceConfig as TraceConfig
from verl.config.prediction import MtpConfig as MtpConfig
from verl.config.rollout import CheckpointEngineConfig as CheckpointEngineConfig
from verl.config.rollout import RolloutConfig as RolloutConfig
from verl.config.rollout import SamplingConfig as SamplingConfig
