"""The whole configuration of ``python -m verl.trainer.main_ppo``."""

from __future__ import annotations

from verl.base_config import BaseConfig, section, subsection
from verl.trainer.config.algorithm import AlgoConfig
from verl.trainer.config.config import (
    CustomRewardFunctionConfig,
    RayConfig,
    RewardManagerConfig,
    TransferQueueConfig,
)
from verl.trainer.config.data import DataConfig
from verl.trainer.config.trainer import TrainerConfig
from verl.utils.profiler.config import PART_OF_PROFILING, GlobalProfilerConfig
from verl.workers.config.actor_rollout_ref import ActorRolloutRefConfig
from verl.workers.config.critic import FSDPCriticConfig
from verl.workers.config.reward_model import RewardModelConfig


@section
class PPOConfig(BaseConfig):
    """Reinforcement learning: data, models, algorithm, run."""

    actor_rollout_ref: ActorRolloutRefConfig = subsection(ActorRolloutRefConfig)
    """Policy, rollout engine and reference."""
    data: DataConfig = subsection(DataConfig)
    """Prompts."""
    critic: FSDPCriticConfig = subsection(FSDPCriticConfig)
    """The value model."""
    reward_model: RewardModelConfig = subsection(RewardModelConfig)
    """Where scores come from."""
    reward_manager: RewardManagerConfig = subsection(RewardManagerConfig)
    """Which reward manager."""
    custom_reward_function: CustomRewardFunctionConfig = subsection(CustomRewardFunctionConfig)
    """A scorer of your own."""
    algorithm: AlgoConfig = subsection(AlgoConfig)
    """From scores to advantages."""
    trainer: TrainerConfig = subsection(TrainerConfig)
    """The run."""
    global_profiler: GlobalProfilerConfig = subsection(GlobalProfilerConfig, hint=PART_OF_PROFILING)
    """Profiling."""
    transfer_queue: TransferQueueConfig = subsection(TransferQueueConfig)
    """A queue of samples between stages."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """How Ray is started."""
