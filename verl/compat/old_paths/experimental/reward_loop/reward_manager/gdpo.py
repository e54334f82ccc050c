"""Public path of a manager in :mod:`verl.workers.reward_manager`."""

from verl.workers.reward_manager import GDPORewardManager as GDPORewardManager
