"""What an advantage estimator reads: settings that it cannot have, and those that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.problems import Problem


def estimator_reads(config: PPOConfig) -> Iterator[Problem]:
    """The reward that the estimator reads is the one that the settings make; the estimator must exist."""
    from verl.trainer.ppo.core_algos import adv_needs

    algorithm = config.algorithm
    name, needs = algorithm.adv_estimator, adv_needs(algorithm.adv_estimator)
    if algorithm.use_kl_in_reward and needs.no_kl_in_reward:
        wrong = f"algorithm.adv_estimator={name} cannot have KL in the reward: {needs.no_kl_in_reward}"
        remedy = "put the KL into the loss: actor_rollout_ref.actor.use_kl_loss=true"
        yield Problem("algorithm.use_kl_in_reward", True, wrong, "false", remedy)
    if algorithm.rollout_correction.bypass_mode and "sum_pi_squared" in needs.columns:
        wrong = f"algorithm.adv_estimator={name} reads Σπ², which the skipped pass of the actor would compute"
        yield Problem("algorithm.rollout_correction.bypass_mode", True, wrong, "false")
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name == "gdpo" and not keys:
        wrong = "algorithm.adv_estimator=gdpo compares components of the reward, and this names none"
        remedy = "name keys of the dict that the reward function returns, e.g. [accuracy,format]"
        yield Problem("algorithm.gdpo_reward_keys", keys, wrong, remedy=remedy)
    elif name == "gdpo" and len(set(keys or ())) < len(keys or ()):
        wrong = "a component is named twice, and would be counted once"
        yield Problem("algorithm.gdpo_reward_keys", list(keys or ()), wrong, remedy="weigh it by gdpo_reward_weights")
    elif name == "gdpo" and weights is not None and len(weights) != len(keys or ()):
        wrong = f"algorithm.gdpo_reward_keys names {len(keys or ())} components: {', '.join(keys or ())}"
        yield Problem("algorithm.gdpo_reward_weights", list(weights), wrong, "one number for each, or null")


def with_sum_pi_squared(config: PPOConfig) -> PPOConfig:
    """``actor.calculate_sum_pi_squared`` turned on where the estimator reads ``sum_pi_squared``."""
    from verl.trainer.ppo.core_algos import adv_needs

    if "sum_pi_squared" not in adv_needs(config.algorithm.adv_estimator).columns:
        return config
    roles = config.actor_rollout_ref
    actor = replace(roles.actor, calculate_sum_pi_squared=True)
    return replace(config, actor_rollout_ref=replace(roles, actor=actor))
