"""Public path of the reward loop; see :mod:`verl.base.absent`."""

from verl.base.doors import old_names

__getattr__ = old_names(__name__)
