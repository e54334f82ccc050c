"""Public path of code for sharding managers, of which one is here; see :mod:`verl.base.absent`."""

from verl.base.doors import old_names

__getattr__ = old_names(__name__)
