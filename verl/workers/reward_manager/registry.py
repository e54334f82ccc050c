"""Reward managers by name."""

from __future__ import annotations

from verl.utils.registry import Registry
from verl.workers.reward_manager.abstract import AbstractRewardManager

REWARD_MANAGERS: Registry[type[AbstractRewardManager]] = Registry("reward manager")

register = REWARD_MANAGERS.register


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """The reward manager called ``name``; an unknown name is an error that lists those that exist."""
    return REWARD_MANAGERS.get(name)
