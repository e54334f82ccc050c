"""Public path of the reward loop; see :mod:`verl.compat.absent_names`."""

from verl.trainer.config.reward_section import migrate_legacy_reward_impl as migrate_legacy_reward_impl
