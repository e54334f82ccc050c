"""Reward managers: a batch of responses in, scores out."""

from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import get_reward_manager_cls, register

__all__ = ["AbstractRewardManager", "NaiveRewardManager", "get_reward_manager_cls", "register"]
