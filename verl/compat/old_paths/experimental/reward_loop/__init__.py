"""Public path of the reward loop; see :mod:`verl.experimental.reward_loop.reward_manager`."""

from verl.trainer.config.reward_section import migrate_legacy_reward_impl as migrate_legacy_reward_impl
