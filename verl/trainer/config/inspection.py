"""The configurations of runs whose data alone is looked at: the same keys, fewer rules."""

from __future__ import annotations

from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.preference import DPOConfig, RMConfig
from verl.trainer.config.sft import SFTConfig


class InspectedPPO(PPOConfig):
    """A PPO run of which only data and tokenizer must be there."""


class InspectedSFT(SFTConfig):
    """A supervised run, likewise."""


class InspectedRM(RMConfig):
    """A run for a reward model, likewise."""


class InspectedDPO(DPOConfig):
    """A DPO run, likewise."""
