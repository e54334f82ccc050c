"""Public address of the sections of the configuration that workers read (``verl.config``)."""

from verl.compat.import_hooks import old_names
from verl.config import ActorConfig as ActorConfig
from verl.config import ActorRolloutRefConfig as ActorRolloutRefConfig
from verl.config import AgentLoopConfig as AgentLoopConfig
from verl.config import CheckpointConfig as CheckpointConfig
from verl.config import CheckpointEngineConfig as CheckpointEngineConfig
from verl.config import CriticConfig as CriticConfig
from verl.config import FSDPActorConfig as FSDPActorConfig
from verl.config import FSDPCriticConfig as FSDPCriticConfig
from verl.config import FSDPCriticModelCfg as FSDPCriticModelCfg
from verl.config import FSDPEngineConfig as FSDPEngineConfig
from verl.config import FSDPOptimizerConfig as FSDPOptimizerConfig
from verl.config import HFModelConfig as HFModelConfig
from verl.config import McoreActorConfig as McoreActorConfig
from verl.config import McoreEngineConfig as McoreEngineConfig
from verl.config import MixedPrecisionConfig as MixedPrecisionConfig
from verl.config import MultiTurnConfig as MultiTurnConfig
from verl.config import OptimizerConfig as OptimizerConfig
from verl.config import PolicyLossConfig as PolicyLossConfig
from verl.config import PrometheusConfig as PrometheusConfig
from verl.config import RefConfig as RefConfig
from verl.config import RewardModelConfig as RewardModelConfig
from verl.config import RolloutConfig as RolloutConfig
from verl.config import RolloutCorrectionConfig as RolloutCorrectionConfig
from verl.config import RouterReplayConfig as RouterReplayConfig
from verl.config import SamplingConfig as SamplingConfig
from verl.config import SandboxFusionConfig as SandboxFusionConfig
from verl.config import TraceConfig as TraceConfig
from verl.config import WrapPolicyConfig as WrapPolicyConfig

__getattr__ = old_names(__name__)
