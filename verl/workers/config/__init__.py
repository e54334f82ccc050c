"""Sections of the configuration that workers read; one file per section."""

from verl.utils.profiler.config import GlobalProfilerConfig, ProfilerConfig
from verl.workers.config.actor import (
    ActorConfig,
    FSDPActorConfig,
    PolicyLossConfig,
    RefConfig,
    RouterReplayConfig,
)
from verl.workers.config.actor_rollout_ref import ActorRolloutRefConfig
from verl.workers.config.agent import AgentLoopConfig, CustomAsyncServerConfig, MultiTurnConfig
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.config.critic import CriticConfig, FSDPCriticConfig, FSDPCriticModelCfg
from verl.workers.config.engine import FSDPEngineConfig, MixedPrecisionConfig, WrapPolicyConfig
from verl.workers.config.model import HFModelConfig, MtpConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig, OptimizerConfig
from verl.workers.config.reward_model import RewardModelConfig, SandboxFusionConfig
from verl.workers.config.rollout import (
    CheckpointEngineConfig,
    PrometheusConfig,
    RolloutConfig,
    SamplingConfig,
    TraceConfig,
)
from verl.workers.config.rollout_correction import RolloutCorrectionConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentLoopConfig",
    "CheckpointConfig",
    "CheckpointEngineConfig",
    "CriticConfig",
    "CustomAsyncServerConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPCriticModelCfg",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "GlobalProfilerConfig",
    "HFModelConfig",
    "MixedPrecisionConfig",
    "MtpConfig",
    "MultiTurnConfig",
    "OptimizerConfig",
    "PolicyLossConfig",
    "ProfilerConfig",
    "PrometheusConfig",
    "RefConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RouterReplayConfig",
    "SamplingConfig",
    "SandboxFusionConfig",
    "TraceConfig",
    "WrapPolicyConfig",
]
