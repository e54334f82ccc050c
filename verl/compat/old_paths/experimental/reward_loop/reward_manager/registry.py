"""Public path of the registry of reward managers, :mod:`verl.workers.reward_manager`."""

from verl.compat.import_hooks import old_names
from verl.workers.reward_manager import get_reward_manager_cls as get_reward_manager_cls
from verl.workers.reward_manager import register as register
from verl.workers.reward_manager.abstract import REWARD_MANAGER_REGISTRY as REWARD_MANAGER_REGISTRY

__getattr__ = old_names(__name__)
