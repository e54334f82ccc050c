"""Public path of the reward loop; see :mod:`verl.experimental.reward_loop.reward_manager`."""

from verl.base.doors import old_names

__getattr__ = old_names(__name__)
