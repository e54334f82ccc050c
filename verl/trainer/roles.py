"""Roles of worker groups, and the roles and columns that a configuration needs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from verl.base.import_utils import prepare_process
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config import PPOConfig


WITH_CRITIC = ("bi_level_gae", "gae")
"""Verl's estimators that read values."""
WITHOUT_CRITIC = (
    "gdpo", "gigpo", "gpg", "grpo", "grpo_passk", "grpo_per_turn", "grpo_vectorized", "hierarchical_grpo", "maxrl",
    "opo", "optimal_token_baseline", "rae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo",
    "rloo_vectorized", "tir_optimal_token_baseline",
)  # fmt: skip
"""Verl's estimators that read none. Of others the registry is asked, which imports PyTorch."""


class Role(enum.Enum):
    """Role of a worker group; the value is its name in worker groups, logs and metrics."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"
    Env = "env"
    TeacherModel = "teacher"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_string(cls, name: str) -> Role:
        """Parse a role; the inverse of ``str(role)``. Raises ConfigError for an unknown name."""
        try:
            return cls(name)
        except ValueError:
            raise ConfigError(f"unknown role '{name}'. Known: {', '.join(role.value for role in cls)}.") from None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The optional parts of a PPO step that a configuration needs."""

    critic: bool
    """Values of a critic, for the estimator or because of ``critic.enable=true``."""
    reference: bool
    """Log-probs of the frozen reference, for a KL term."""
    reward_model: bool
    """Scores of a discriminative reward model."""
    judge: bool
    """Answers of a generative reward model to a reward function."""
    teacher: bool
    """Log-probs of teachers, for distillation; the policy may be its own."""
    correction: bool
    """Correction for the difference between rollout and trainer on the driver, by weights or rejection."""

    @classmethod
    def from_config(cls, config: PPOConfig) -> Needs:
        """Derive the needs from ``config``; a critic may follow from the parameter names of the estimator."""
        return cls(
            critic=need_critic(config),
            reference=need_reference_policy(config),
            reward_model=need_reward_model(config) and config.judge is None,
            judge=config.judge is not None,
            teacher=config.distillation.enabled,
            correction=config.algorithm.rollout_correction.is_decoupled,
        )


def need_critic(config: PPOConfig | Mapping[str, object]) -> bool:
    """Return whether a critic is trained: ``critic.enable`` if set, else whether the estimator reads ``values``."""
    typed = _with_attributes(config)
    if typed.critic.enable is not None:
        return bool(typed.critic.enable)
    if typed.algorithm.adv_estimator in (*WITH_CRITIC, *WITHOUT_CRITIC):
        return typed.algorithm.adv_estimator in WITH_CRITIC
    from verl.algorithms import adv_needs
    from verl.algorithms.estimator_registry import ESTIMATORS

    if typed.algorithm.adv_estimator not in ESTIMATORS.names():
        prepare_process()  # a task runner of the user's own asks before the workers' processes are prepared
    return "values" in adv_needs(typed.algorithm.adv_estimator).columns


def need_reference_policy(config: PPOConfig | Mapping[str, object] | Mapping[Role, type]) -> bool:
    """Return whether a frozen reference policy is loaded, for KL in the reward or in the loss.

    Of a dict of roles: whether the reference has a worker.
    """
    if _is_role_mapping(config):
        return Role.RefPolicy in config
    typed = _with_attributes(config)
    return bool(typed.algorithm.use_kl_in_reward or typed.actor_rollout_ref.actor.use_kl_loss)


def need_reward_model(config: PPOConfig | Mapping[Role, type]) -> bool:
    """Return whether a reward model of either kind is loaded: by the configuration, or as one of the roles."""
    if _is_role_mapping(config):
        return Role.RewardModel in config
    return bool(_with_attributes(config).reward_model.enable)


def need_teacher_policy(config: PPOConfig | Mapping[str, object]) -> bool:
    """Return whether teachers are loaded, for distillation; a policy that teaches itself needs none."""
    section = _with_attributes(config).get("distillation")
    if not section or not section.get("enabled", False):
        return False
    return not (section.get("self_distillation") or {}).get("enabled", False)


def teachers_share_actor_ranks(config: PPOConfig) -> bool:
    """Return whether teachers share the policy's workers, because the divergence reads the whole vocabulary."""
    from verl.algorithms.distillation import reads_vocabulary

    return config.distillation.enabled and reads_vocabulary(config.distillation)


def _is_role_mapping(config: object) -> TypeGuard[Mapping[Role, type]]:
    return isinstance(config, Mapping) and all(isinstance(key, Role) for key in config)


def _with_attributes(config: object) -> Any:
    """Let a plain dict be read by attributes, as the configuration itself and a DictConfig are."""
    if not isinstance(config, dict):
        return config
    from omegaconf import OmegaConf

    return OmegaConf.create(config)


def worker_arguments(config: PPOConfig, needs: Needs) -> dict[Role, dict[str, object]]:
    """Constructor arguments of each role's workers, in the order in which models are loaded."""
    roles = config.actor_rollout_ref
    arguments: dict[Role, dict[str, object]] = {}
    if needs.critic:
        arguments[Role.Critic] = {"config": config.critic}
    if needs.reference and not roles.model.has_adapters:
        arguments[Role.RefPolicy] = {"config": roles, "role": "ref"}
    if needs.reward_model:
        arguments[Role.RewardModel] = {"config": config.reward_model}
    if needs.judge:
        arguments[Role.RewardModel] = {"config": config.judge, "role": "rollout"}
    policy: dict[str, object] = {"config": roles}
    if needs.teacher:
        policy["distillation_config"] = config.distillation
    if needs.teacher and not (config.distillation.is_self_distillation or teachers_share_actor_ranks(config)):
        passes = config.distillation.has_forward_passes
        arguments[Role.TeacherModel] = {"config": config.distillation}
        arguments[Role.TeacherModel] |= {"roles": roles} if passes else {"student": roles.model}
    # The actor comes last: its rollout engine takes its share of the memory that the others left.
    if roles.hybrid_engine:
        arguments[Role.ActorRollout] = policy | {"role": "actor_rollout"}
    else:
        arguments[Role.Actor] = policy | {"role": "actor"}
        arguments[Role.Rollout] = {"config": roles.for_rollout_pool, "role": "rollout"}
    return arguments
