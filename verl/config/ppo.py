"""Root section of ``python -m verl.trainer.main_ppo``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from verl.config.actor import FSDPActorConfig, RefConfig
from verl.config.algorithm import AlgoConfig
from verl.config.base import INTERNAL, BaseConfig, section, setting, subsection
from verl.config.critic import FSDPCriticConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.model import NO_OTHER_BACK_END, HFModelConfig
from verl.config.problems import Problem
from verl.config.profiler import GlobalProfilerConfig
from verl.config.reward import CustomRewardFunctionConfig, RewardManagerConfig, RewardModelConfig
from verl.config.rollout import SERVER_ENGINES, RolloutConfig
from verl.config.trainer import RayConfig, TrainerConfig


@section
class ActorRolloutRefConfig(BaseConfig):
    """Policy, rollout engine and reference."""

    hybrid_engine: bool = setting(True)
    """Rollout engines run on the ranks of the policy; false gives them a pool of ranks of their own, of
    `rollout.nnodes` nodes with `rollout.n_gpus_per_node` ranks each (with `trainer.controller=ray`)."""
    nccl_timeout: int = setting(600, ge=1)
    """Time limit of a collective, in seconds; after it the collective fails. Unless set, larger for large models."""
    model: HFModelConfig = subsection(HFModelConfig)
    """The model of policy, rollout and reference."""
    actor: FSDPActorConfig = subsection(FSDPActorConfig)
    """The policy that is trained."""
    rollout: RolloutConfig = subsection(RolloutConfig)
    """Sampling settings and engine."""
    ref: RefConfig = subsection(RefConfig)
    """The frozen reference."""

    @property
    def for_rollout_pool(self) -> ActorRolloutRefConfig:
        """The configuration of rollout engines on ranks of their own, where nothing else needs their memory."""
        return replace(self, rollout=replace(self.rollout, free_cache_engine=False))

    @property
    def trained_model(self) -> HFModelConfig:
        """The model section with the actor's own ``use_remove_padding``."""
        return replace(self.model, use_remove_padding=self.actor.use_remove_padding)

    def problems(self, path: str) -> Iterator[Problem]:
        """A pool of rollout engines has nodes, and only adapters that the engine knows are sent by themselves."""
        nodes, key = self.rollout.nnodes, f"{path}.rollout.nnodes".lstrip(".")
        if not self.hybrid_engine and nodes == 0:
            cause = (
                f"{path}.hybrid_engine=false gives the rollout engines ranks of their own, and this pool has no node"
            )
            remedy = f"set {key}=1 and {path}.rollout.n_gpus_per_node, or {path}.hybrid_engine=true"
            yield Problem(key, nodes, cause, ">= 1", remedy)
        if self.hybrid_engine and nodes > 0:
            cause = f"with {path}.hybrid_engine=true the rollout engines run on the ranks of the policy"
            remedy = f"set {path}.hybrid_engine=false for a pool of their own"
            yield Problem(key, nodes, cause, "0", remedy)
        if self.rollout.merge_adapters:
            return
        key, cause = f"{path}.rollout.merge_adapters".lstrip("."), ""
        if self.rollout.name not in SERVER_ENGINES:
            engines = " and ".join(SERVER_ENGINES)
            cause = f"rollout.name={self.rollout.name} merges where that rounds nothing; only {engines} can be told"
        elif not self.model.has_adapters:
            cause = "no adapters are trained (model.lora_rank=0)"
        elif self.model.lora.use_dora:
            cause = f"{self.rollout.name} has no DoRA (model.lora.use_dora=true)"
        elif self.model.lora.target_parameters:
            cause = f"{self.rollout.name} gets adapters of linear layers alone (model.lora.target_parameters)"
        if cause:
            yield Problem(key, False, cause, "true", "leave it out")


@section
class PPOConfig(BaseConfig):
    """Reinforcement learning: data, models, algorithm, run."""

    model_engine: Literal["dp", "veomni", "megatron"] = setting("dp", refuse_values=NO_OTHER_BACK_END)
    """Training back end of all models: `dp` (FSDP, or as their `strategy` says), `veomni` or `megatron`."""
    actor_rollout_ref: ActorRolloutRefConfig = subsection(ActorRolloutRefConfig)
    """Policy, rollout engine and reference."""
    data: DataConfig = subsection(DataConfig)
    """Prompts."""
    critic: FSDPCriticConfig = subsection(FSDPCriticConfig)
    """The value model."""
    reward_model: RewardModelConfig = subsection(RewardModelConfig)
    """Scoring of responses."""
    reward_manager: RewardManagerConfig = subsection(RewardManagerConfig)
    """The reward manager."""
    custom_reward_function: CustomRewardFunctionConfig = subsection(CustomRewardFunctionConfig)
    """Your own scorer."""
    algorithm: AlgoConfig = subsection(AlgoConfig)
    """Advantages, discounting, KL in the reward."""
    distillation: DistillationConfig = subsection(DistillationConfig)
    """Learning from teachers, on the responses of the policy."""
    trainer: TrainerConfig = subsection(TrainerConfig)
    """Length, placement, logging, checkpoints and recovery of the run."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """Settings with which Ray is started."""
    global_profiler: GlobalProfilerConfig = subsection(GlobalProfilerConfig)
    """Profiles of some steps."""
    composed: dict[str, object] = dataclasses.field(default_factory=dict, compare=False, metadata=INTERNAL)
    """The keys as they were composed, including those that no code reads, for a user's own ``fit``."""

    def with_schedules(self, steps: int) -> PPOConfig:
        """Return the configuration of a run of so many steps: learning-rate schedules have their length."""
        roles, critic = self.actor_rollout_ref, self.critic
        actor = replace(roles.actor, optim=roles.actor.optim.with_length(steps))
        critic = replace(critic, optim=critic.optim.with_length(steps))
        return replace(self, actor_rollout_ref=replace(roles, actor=actor), critic=critic)

    @property
    def judge_answers_agents(self) -> bool:
        """True if the judge is awake while conversations are held, too: on ranks that have no other work."""
        is_apart = self.reward_model.enable_resource_pool and self.trainer.controller == "ray"
        return self.judge is not None and is_apart

    @property
    def judge(self) -> ActorRolloutRefConfig | None:
        """Model and engine of a generative reward model, which a reward function asks; None if the run has none."""
        section = self.reward_model
        asks = self.custom_reward_function.path or section.reward_format == "llm_judge"
        if not (section.enable and section.rollout.name and (asks or self.reward_manager.source == "importlib")):
            return None
        settings = {name: section.rollout[name] for name in section.rollout}
        # Ranks of its own have no other work, so nothing needs the engine's memory.
        settings["free_cache_engine"] &= not section.enable_resource_pool
        return ActorRolloutRefConfig(
            model=HFModelConfig.like(section.model),
            rollout=RolloutConfig(**settings, seed=self.trainer.seed),
        )
