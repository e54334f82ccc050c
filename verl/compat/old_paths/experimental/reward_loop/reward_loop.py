"""Public path of the reward loop; see :mod:`verl.compat.absent_names`."""

from verl.compat.import_hooks import old_names
from verl.trainer.config.reward_section import migrate_legacy_reward_impl as migrate_legacy_reward_impl

__getattr__ = old_names(__name__)
