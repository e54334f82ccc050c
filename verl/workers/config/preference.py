"""What training on preferences minimises, and what it compares with."""

from __future__ import annotations

from verl.base_config import BaseConfig, section, setting
from verl.trainer.ppo.core_algos.preference import PreferenceLossType


@section
class RewardModelLossConfig(BaseConfig):
    """The reward model's loss: Bradley-Terry."""

    margin: float = setting(0.0, ge=0)
    """How far apart the rewards of a pair should be before it counts as even."""
    label_smoothing: float = setting(0.0, ge=0, le=0.5)
    """Share of the pairs that are taken to be labelled the wrong way round."""
    center_rewards_coefficient: float = setting(0.0, ge=0)
    """Weight of the squared sum of a pair's rewards, which keeps rewards around zero; 0.01 is usual."""


@section
class DirectPreferenceLossConfig(BaseConfig):
    """The loss of direct preference optimisation."""

    loss_type: PreferenceLossType = setting("sigmoid")
    """`sigmoid` (DPO), `hinge` (SLiC) or `ipo`."""
    beta: float = setting(0.1, gt=0)
    """How dear it is to leave the reference; rewards are this times the log-ratio to it."""
    label_smoothing: float = setting(0.0, ge=0, le=0.5)
    """Share of the pairs that are taken to be labelled the wrong way round (cDPO); with `loss_type=sigmoid`."""
    margin: float = setting(0.0, ge=0)
    """Difference of rewards that is asked for on top (the gamma of SimPO)."""
    reference_free: bool = setting(False)
    """Reward log-probs themselves instead of their ratio to a reference (SimPO); no reference is loaded."""
    average_log_prob: bool = setting(False)
    """Take the mean of the tokens' log-probs instead of the sum (SimPO), so that length earns nothing."""
    sft_coef: float = setting(0.0, ge=0)
    """Weight of the chosen responses' own loss, -log p per token, which keeps them likely."""


@section
class ReferenceModelConfig(BaseConfig):
    """The frozen policy that log-ratios are taken to."""

    path: str | None = setting(None, path=True)
    """Folder of the model, or its name on the Hugging Face hub; null takes `model.path`, the policy before training."""
    param_offload: bool = setting(False)
    """Keep its parameters in host memory while it is idle."""
