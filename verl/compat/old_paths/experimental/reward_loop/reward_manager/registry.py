"""Public path of the registry of reward managers, :mod:`verl.workers.reward_manager`."""

from verl.workers.reward_manager import get_reward_manager_cls as get_reward_manager_cls
from verl.workers.reward_manager import register as register
from verl.workers.reward_manager.abstract import REWARD_MANAGER_REGISTRY as REWARD_MANAGER_REGISTRY
