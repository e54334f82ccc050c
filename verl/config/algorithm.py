"""Configuration of the algorithm: KL in the reward, advantages, resampling, dynamic sampling, rollout correction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from verl.config.actor import KLKind
from verl.config.base import BaseConfig, section, setting, subsection
from verl.config.problems import Problem
from verl.config.rollout_correction import RolloutCorrectionConfig


@section
class KLControlConfig(BaseConfig):
    """Weight of the KL penalty in the reward."""

    hydra_target: ClassVar[str] = "verl.trainer.config.KLControlConfig"

    type: Literal["fixed", "adaptive"] = setting("fixed")
    """`fixed` keeps the weight; `adaptive` changes it to bring the divergence to `target_kl` (arXiv:1909.08593)."""
    kl_coef: float = setting(0.001, ge=0)
    """Weight of the penalty; with `adaptive` its initial value."""
    horizon: int = setting(10000, ge=1)
    """Number of samples over which an adaptive weight changes."""
    target_kl: float = setting(0.1, gt=0)
    """Target divergence of an adaptive weight."""


@section
class PFPPOConfig(BaseConfig):
    """Probabilities with which PF-PPO samples rows, by their score s (arXiv:2409.06957)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = setting("pow")
    """`pow`: |s|^weight_pow; `max_min`: only the best and the worst; `max_random`: 0.4 the best, 0.1 the others."""
    weight_pow: float = setting(2.0, ge=0)
    """Exponent of `pow`."""


@section
class FilterGroupsConfig(BaseConfig):
    """Dynamic sampling (DAPO, arXiv:2503.14476): replace prompts whose responses all have the same metric."""

    enable: bool = setting(False)
    """Train only on prompts whose responses differ in `metric`, and sample until there are enough of them."""
    metric: str | None = setting(None)
    """Value that must differ within a group: seq_reward, or reward (the summed token scores), or a value from the
    reward function: score, acc."""
    max_num_gen_batches: int = setting(0, ge=0)
    """Stop the run with an error after this many batches of `data.gen_batch_size` prompts for one step; 0 is no limit.
    """


@section
class AlgoConfig(BaseConfig):
    """Advantages, discounting, KL in the reward."""

    hydra_target: ClassVar[str] = "verl.trainer.config.AlgoConfig"

    gamma: float = setting(1.0, ge=0, le=1)
    """Discount per token; per turn for `grpo_per_turn`."""
    high_level_gamma: float | None = setting(None, ge=0, le=1)
    """Discount from one turn of the policy to the next; null uses `gamma`."""
    lam: float = setting(1.0, ge=0, le=1)
    """λ of generalised advantage estimation."""
    adv_estimator: str | None = setting("gae")
    """Registered advantage estimator: gae, grpo, rloo, reinforce_plus_plus, remax, opo, gpg, ..., or your own; null
    only in the configuration of a Python program that computes advantages itself."""
    norm_adv_by_std_in_grpo: bool = setting(True)
    """Divide by the group's standard deviation (GRPO and related estimators); false is Dr. GRPO (arXiv:2503.20783)."""
    use_kl_in_reward: bool = setting(False)
    """Subtract the weighted divergence from the reference from the reward of every token."""
    kl_penalty: KLKind = setting("kl")
    """Estimator of that divergence: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = subsection(KLControlConfig)
    """Weight of the KL penalty in the reward."""
    gdpo_reward_keys: tuple[str, ...] | None = setting(None)
    """`gdpo`: components of the reward, as keys of the dict that the reward function returns."""
    gdpo_reward_weights: tuple[float, ...] | None = setting(None)
    """`gdpo`: a weight for each component; null weighs all equally, by 1."""
    step_advantage_weight: float = setting(1.0, ge=0)
    """`gigpo`: weight ω of the comparison of turns from the same state, beside that of whole responses."""
    episode_agents: tuple[str, ...] | None = setting(None)
    """`hierarchical_grpo`: agents that are compared within their trajectory, such as [solver]: those of this name, and
    those with this name before a `/` (`solver/1`). Others are compared with the same agent in sibling trajectories."""
    rae_decay: float = setting(0.95, ge=0, lt=1)
    """`rae`: how much of the mean reward of an agent is kept with every further reward of it."""
    use_pf_ppo: bool = setting(False)
    """PF-PPO (arXiv:2409.06957): resample the rows of an update with replacement, by their score."""
    pf_ppo: PFPPOConfig = subsection(PFPPOConfig)
    """Weights of samples in PF-PPO."""
    filter_groups: FilterGroupsConfig = subsection(FilterGroupsConfig)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = subsection(RolloutCorrectionConfig)
    """Correction for the gap between rollout and trainer."""

    def problems(self, path: str) -> Iterator[Problem]:
        """`gdpo` names components of the reward, each with a weight; `hierarchical_grpo` names agents."""
        if self.adv_estimator == "hierarchical_grpo" and not self.episode_agents:
            cause = f"{path}.adv_estimator=hierarchical_grpo compares some agents within their trajectory: name them"
            yield Problem(f"{path}.episode_agents", self.episode_agents, cause, remedy="e.g. [solver]")
        if self.adv_estimator != "gdpo":
            return
        key, keys, weights = f"{path}.gdpo_reward_keys", self.gdpo_reward_keys or (), self.gdpo_reward_weights
        if not keys:
            cause = f"{path}.adv_estimator=gdpo compares components of the reward, and this names none"
            remedy = "name keys of the dict that the reward function returns, e.g. [accuracy,format]"
            yield Problem(key, self.gdpo_reward_keys, cause, remedy=remedy)
        elif len(set(keys)) < len(keys):
            cause = "a component is named twice, and would be counted once"
            yield Problem(key, list(keys), cause, remedy="weigh it by gdpo_reward_weights")
        elif weights is not None and len(weights) != len(keys):
            cause = f"{key} names {len(keys)} components: {', '.join(keys)}"
            yield Problem(f"{path}.gdpo_reward_weights", list(weights), cause, "one number for each, or null")
