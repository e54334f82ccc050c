"""Public path of the reward loop; see :mod:`verl.experimental.reward_loop.reward_manager`."""

from verl.base.doors import absent_names

__getattr__ = absent_names(__name__)
