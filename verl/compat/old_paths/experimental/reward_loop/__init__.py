"""Public path of the reward loop; see :mod:`verl.experimental.reward_loop.reward_manager`."""

from verl.compat.import_hooks import old_names
from verl.trainer.config.reward_section import migrate_legacy_reward_impl as migrate_legacy_reward_impl

__getattr__ = old_names(__name__)
