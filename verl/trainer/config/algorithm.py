"""From scores to advantages."""

from __future__ import annotations

from typing import ClassVar, Literal

from verl.base_config import BaseConfig, section, setting, subsection
from verl.workers.config.actor import KLKind
from verl.workers.config.rollout_correction import RolloutCorrectionConfig

NO_FILTER = "dynamic sampling is not in this version; set algorithm.filter_groups.enable=false"
NO_PF_PPO = "reweighting of samples (PF-PPO) is not in this version; set algorithm.use_pf_ppo=false"


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
    """Reweighting of samples by their score."""

    reweight_method: Literal["pow", "max_min", "max_random"] = setting("pow")
    """How samples are weighted."""
    weight_pow: float = setting(2.0)
    """Exponent of `pow`."""


@section
class FilterGroupsConfig(BaseConfig):
    """Dynamic sampling: drop groups whose samples all score the same, sample others in their place."""

    enable: bool = setting(False, refuse=NO_FILTER)
    """Drop and sample again."""
    metric: str | None = setting(None)
    """What must differ inside a group: acc, score, seq_reward, seq_final_reward."""
    max_num_gen_batches: int = setting(0, ge=0)
    """Give up after this many batches; 0 never."""


@section
class AlgoConfig(BaseConfig):
    """Advantages, discounting, KL in the reward."""

    hydra_target: ClassVar[str] = "verl.trainer.config.AlgoConfig"

    gamma: float = setting(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = setting(1.0, ge=0, le=1)
    """λ of generalised advantage estimation."""
    adv_estimator: str = setting("gae")
    """Registered advantage estimator: gae, grpo, rloo, reinforce_plus_plus, remax, or one of yours."""
    norm_adv_by_std_in_grpo: bool = setting(True)
    """Divide by the group's standard deviation (GRPO); false is Dr. GRPO (arXiv:2503.20783)."""
    use_kl_in_reward: bool = setting(False)
    """Take the divergence from the reference off the reward of every token."""
    kl_penalty: KLKind = setting("kl")
    """Its estimator: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = subsection(KLControlConfig)
    """Its weight."""
    use_pf_ppo: bool = setting(False, refuse=NO_PF_PPO)
    """Reweight samples by their score."""
    pf_ppo: PFPPOConfig = subsection(PFPPOConfig, hint="part of PF-PPO, which is not in this version")
    """How samples are weighted."""
    filter_groups: FilterGroupsConfig = subsection(
        FilterGroupsConfig, hint="part of dynamic sampling, which is not in this version"
    )
    """Dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = subsection(RolloutCorrectionConfig)
    """Correction for the gap between rollout and trainer."""
