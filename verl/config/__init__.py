"""Sections of the configuration: typed, frozen dataclasses with a sentence for each key."""

import verl.config.inactive  # noqa: F401  (fills the tables of inactive keys)
from verl.config.actor import (
    ActorConfig,
    FSDPActorConfig,
    McoreActorConfig,
    PolicyLossConfig,
    RefConfig,
    RouterReplayConfig,
    UpdateConfig,
)
from verl.config.agent import (
    AgentLoopConfig,
    MultiTurnConfig,
)
from verl.config.algorithm import (
    AlgoConfig,
    FilterGroupsConfig,
    KLControlConfig,
    PFPPOConfig,
)
from verl.config.asynchronous import (
    AsyncConfig,
    ColocateAsyncConfig,
    OffPolicySamplerConfig,
    SeparateAsyncConfig,
    V1Config,
)
from verl.config.base import (
    BaseConfig,
    local_copies,
)
from verl.config.critic import (
    CriticConfig,
    FSDPCriticConfig,
    FSDPCriticModelCfg,
)
from verl.config.data import (
    CurriculumConfig,
    CustomClassConfig,
    DataConfig,
    DatagenConfig,
    SamplerConfig,
)
from verl.config.distillation import (
    DistillationConfig,
    DistillationLossConfig,
    DistillationTeacherModelConfig,
    DivergenceConfig,
    SelfDistillationConfig,
    TeacherInferenceConfig,
)
from verl.config.generation import (
    EvalConfig,
    EvalDataConfig,
    GenerationConfig,
    GenerationDataConfig,
)
from verl.config.megatron import McoreEngineConfig
from verl.config.model import (
    CheckpointConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    LoRAConfig,
    MixedPrecisionConfig,
    OptimizerConfig,
    PretrainedModelConfig,
    TrainedModelConfig,
    WrapPolicyConfig,
)
from verl.config.observation import PrometheusConfig, TraceConfig
from verl.config.ppo import (
    ActorRolloutRefConfig,
    PPOConfig,
)
from verl.config.prediction import MtpConfig
from verl.config.preference import (
    DirectPreferenceLossConfig,
    DPOConfig,
    PreferenceConfig,
    PreferenceDataConfig,
    ReferenceModelConfig,
    RewardModelLossConfig,
    RMConfig,
)
from verl.config.problems import (
    Problem,
)
from verl.config.profiler import (
    GlobalProfilerConfig,
    GlobalToolsConfig,
    MemoryHistoryConfig,
    ModelProfilerConfig,
    ModelToolsConfig,
    RewardProfilerConfig,
    RoleProfilerConfig,
    TorchProfilerToolConfig,
)
from verl.config.reward import (
    CustomRewardFunctionConfig,
    FailurePolicy,
    JudgeRolloutConfig,
    ModuleConfig,
    RewardManagerConfig,
    RewardModelConfig,
    RewardModelModelConfig,
    SandboxFusionConfig,
)
from verl.config.rollout import (
    CheckpointEngineConfig,
    RolloutConfig,
    SamplingConfig,
)
from verl.config.rollout_correction import (
    RolloutCorrectionConfig,
)
from verl.config.serve import SamplerEngineConfig, ServeConfig, ServerConfig
from verl.config.sft import SFTConfig, SFTDataConfig, SFTDistillationConfig
from verl.config.supervised import (
    SupervisedConfig,
    SupervisedDataConfig,
)
from verl.config.trainer import (
    BaseTrainerConfig,
    PlacementConfig,
    RayConfig,
    RecoveryConfig,
    SFTTrainerConfig,
    TrainerConfig,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentLoopConfig",
    "AlgoConfig",
    "AsyncConfig",
    "BaseConfig",
    "BaseTrainerConfig",
    "CheckpointConfig",
    "CheckpointEngineConfig",
    "ColocateAsyncConfig",
    "CriticConfig",
    "CurriculumConfig",
    "CustomClassConfig",
    "CustomRewardFunctionConfig",
    "DPOConfig",
    "DataConfig",
    "DatagenConfig",
    "DirectPreferenceLossConfig",
    "DistillationConfig",
    "DistillationLossConfig",
    "DistillationTeacherModelConfig",
    "DivergenceConfig",
    "EvalConfig",
    "EvalDataConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPCriticModelCfg",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "FailurePolicy",
    "FilterGroupsConfig",
    "GenerationConfig",
    "GenerationDataConfig",
    "GlobalProfilerConfig",
    "GlobalToolsConfig",
    "HFModelConfig",
    "JudgeRolloutConfig",
    "KLControlConfig",
    "LoRAConfig",
    "McoreActorConfig",
    "McoreEngineConfig",
    "MemoryHistoryConfig",
    "MixedPrecisionConfig",
    "ModelProfilerConfig",
    "ModelToolsConfig",
    "ModuleConfig",
    "MtpConfig",
    "MultiTurnConfig",
    "OffPolicySamplerConfig",
    "OptimizerConfig",
    "PFPPOConfig",
    "PPOConfig",
    "PlacementConfig",
    "PolicyLossConfig",
    "PreferenceConfig",
    "PreferenceDataConfig",
    "PretrainedModelConfig",
    "Problem",
    "PrometheusConfig",
    "RMConfig",
    "RayConfig",
    "RecoveryConfig",
    "RefConfig",
    "ReferenceModelConfig",
    "RewardManagerConfig",
    "RewardModelConfig",
    "RewardModelLossConfig",
    "RewardModelModelConfig",
    "RewardProfilerConfig",
    "RoleProfilerConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RouterReplayConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTDistillationConfig",
    "SFTTrainerConfig",
    "SamplerConfig",
    "SamplerEngineConfig",
    "SamplingConfig",
    "SandboxFusionConfig",
    "SelfDistillationConfig",
    "SeparateAsyncConfig",
    "ServeConfig",
    "ServerConfig",
    "SupervisedConfig",
    "SupervisedDataConfig",
    "TeacherInferenceConfig",
    "TorchProfilerToolConfig",
    "TraceConfig",
    "TrainedModelConfig",
    "TrainerConfig",
    "UpdateConfig",
    "V1Config",
    "WrapPolicyConfig",
    "local_copies",
]
