"""Reward managers, which compute the scores of a batch of responses."""

from verl.workers.reward_manager.abstract import AbstractRewardManager, get_reward_manager_cls, register
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.reward_manager.naive import (
    BatchRewardManager,
    GDPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
)
from verl.workers.reward_manager.services import RateLimitedRewardManager, RemoteRewardManager
from verl.workers.reward_manager.texts import ResponseTexts, response_texts

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "GDPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RateLimitedRewardManager",
    "RemoteRewardManager",
    "ResponseTexts",
    "get_reward_manager_cls",
    "register",
    "response_texts",
]
