"""The reward managers under the path of the reward loop: the classes of :mod:`verl.workers.reward_manager`.

Each has ``async run_single(data) -> {"reward_score", "reward_extra_info"}``.
"""

from verl.workers.reward_manager import (
    AbstractRewardManager,
    BatchRewardManager,
    DAPORewardManager,
    GDPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    RateLimitedRewardManager,
    RemoteRewardManager,
    get_reward_manager_cls,
    register,
)

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "GDPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RateLimitedRewardManager",
    "RemoteRewardManager",
    "get_reward_manager_cls",
    "register",
]
