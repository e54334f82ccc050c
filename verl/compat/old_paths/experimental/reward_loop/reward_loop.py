"""Public path of the reward loop; see :mod:`verl.base.absent`."""

from verl.base.doors import old_names
from verl.trainer.config.reward_section import migrate_legacy_reward_impl as migrate_legacy_reward_impl

__getattr__ = old_names(__name__)
