from verl.workers.reward_manager import get_reward_manager_cls as get_reward_manager_cls
from verl.workers.reward_manager import register as register
