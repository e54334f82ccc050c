"""Public path of a manager in :mod:`verl.workers.reward_manager`, and of a limit of rates."""

from verl.compat.toolkit.limits import AsyncTokenBucket as AsyncTokenBucket
from verl.workers.reward_manager import RateLimitedRewardManager as RateLimitedRewardManager
