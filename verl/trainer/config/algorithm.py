"""From scores to advantages."""

from __future__ import annotations

from typing import ClassVar, Literal

from verl.base_config import BaseConfig, section, setting, subsection
from verl.workers.config.actor import KLKind
from verl.workers.config.rollout_correction import RolloutCorrectionConfig


@section
class KLControlConfig(BaseConfig):
    """Weight of the KL penalty in the reward."""

    hydra_target: ClassVar[str] = "verl.trainer.config.KLControlConfig"

    type: Literal["fixed", "adaptive"] = setting("fixed")
    """Keep the weight, or steer the divergence towards `target_kl` (arXiv:1909.08593)."""
    kl_coef: float = setting(0.001, ge=0)
    """Weight, or the first weight if it adapts."""
    horizon: int = setting(10000, ge=1)
    """Samples over which an adaptive weight changes."""
    target_kl: float = setting(0.1, gt=0)
    """Divergence that an adaptive weight aims at."""


@section
class PFPPOConfig(BaseConfig):
    """How likely a sample is to be drawn, by its score s (arXiv:2409.06957)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = setting("pow")
    """`pow`: |s|^weight_pow; `max_min`: only the best and the worst; `max_random`: 0.4 the best, 0.1 the others."""
    weight_pow: float = setting(2.0, ge=0)
    """Exponent of `pow`."""


@section
class FilterGroupsConfig(BaseConfig):
    """Dynamic sampling (DAPO, arXiv:2503.14476): prompts whose responses all earn the same give way to others."""

    enable: bool = setting(False)
    """Train only on prompts whose responses differ, and sample until there are enough of them."""
    metric: str | None = setting(None)
    """What must differ: seq_reward (the summed token scores), or what the reward function returns: score, acc."""
    max_num_gen_batches: int = setting(0, ge=0)
    """Give up after this many batches of `data.gen_batch_size` prompts; 0 never."""


@section
class AlgoConfig(BaseConfig):
    """Advantages, discounting, KL in the reward."""

    hydra_target: ClassVar[str] = "verl.trainer.config.AlgoConfig"

    gamma: float = setting(1.0, ge=0, le=1)
    """Discount per token; per turn for `grpo_per_turn`."""
    lam: float = setting(1.0, ge=0, le=1)
    """λ of generalised advantage estimation."""
    adv_estimator: str = setting("gae")
    """Registered advantage estimator: gae, grpo, rloo, reinforce_plus_plus, remax, opo, gpg, ..., or one of yours."""
    norm_adv_by_std_in_grpo: bool = setting(True)
    """Divide by the group's standard deviation (GRPO and what builds on it); false is Dr. GRPO (arXiv:2503.20783)."""
    use_kl_in_reward: bool = setting(False)
    """Take the divergence from the reference off the reward of every token."""
    kl_penalty: KLKind = setting("kl")
    """Its estimator: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = subsection(KLControlConfig)
    """Its weight."""
    gdpo_reward_keys: tuple[str, ...] | None = setting(None)
    """`gdpo`: components of the reward, as keys of the dict that the reward function returns."""
    gdpo_reward_weights: tuple[float, ...] | None = setting(None)
    """`gdpo`: a weight for each of them; null weighs all by 1."""
    use_pf_ppo: bool = setting(False)
    """PF-PPO (arXiv:2409.06957): draw the samples of an update again, with replacement, by their score."""
    pf_ppo: PFPPOConfig = subsection(PFPPOConfig)
    """How samples are weighted."""
    filter_groups: FilterGroupsConfig = subsection(FilterGroupsConfig)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = subsection(RolloutCorrectionConfig)
    """Correction for the gap between rollout and trainer."""
