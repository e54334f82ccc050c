from verl.workers.reward_manager import *
from verl.workers.reward_manager import __all__ as __all__
