"""Who takes part in a run: the roles, and which of them a configuration needs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.errors import ConfigError
from verl.trainer.ppo.core_algos import adv_needs

if TYPE_CHECKING:
    from verl.trainer.config import PPOConfig


class Role(enum.Enum):
    """What a group of workers does; the value is its name in worker groups, logs and metrics."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"
    Env = "env"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_string(cls, name: str) -> Role:
        """The role called ``name``; the inverse of ``str(role)``."""
        try:
            return cls(name)
        except ValueError:
            raise ConfigError(f"unknown role '{name}'. Known: {', '.join(role.value for role in cls)}.") from None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one PPO step has to compute, derived from the configuration alone."""

    critic: bool
    """The estimator reads ``values`` (or ``critic.enable=true`` asks for them)."""
    reference: bool
    """A KL term compares the policy with the frozen reference."""
    reward_model: bool
    """A discriminative reward model scores the responses."""
    siblings: bool
    """The estimator compares the responses to one prompt with each other."""
    greedy_baseline: bool
    """The estimator reads ``reward_baselines``: the reward of one greedy response per prompt."""
    correction: bool
    """The driver corrects for the gap between rollout and trainer, by weights or rejection."""

    @classmethod
    def of(cls, config: PPOConfig) -> Needs:
        """Read the needs of ``config``; an estimator declares its own by its parameter names."""
        columns = adv_needs(config.algorithm.adv_estimator).columns
        return cls(
            critic=need_critic(config),
            reference=need_reference_policy(config),
            reward_model=need_reward_model(config),
            siblings="index" in columns,
            greedy_baseline="reward_baselines" in columns,
            correction=config.algorithm.rollout_correction.is_decoupled,
        )


def need_critic(config: PPOConfig) -> bool:
    """Whether a value model is trained: ``critic.enable`` decides, else the estimator's columns."""
    if config.critic.enable is not None:
        return bool(config.critic.enable)
    return "values" in adv_needs(config.algorithm.adv_estimator).columns


def need_reference_policy(config: PPOConfig) -> bool:
    """Whether the frozen reference policy is computed: for KL in the reward or in the loss."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def need_reward_model(config: PPOConfig) -> bool:
    """Whether a discriminative reward model is loaded."""
    return bool(config.reward_model.enable)
