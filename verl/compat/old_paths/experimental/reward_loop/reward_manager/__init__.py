"""Public path of the reward managers with ``async run_single``: the classes of :mod:`verl.workers.reward_manager`."""

from verl.workers.reward_manager import *
from verl.workers.reward_manager import __all__ as __all__
