"""Public path of the reward loop; see :mod:`verl.experimental.reward_loop.reward_manager`."""
