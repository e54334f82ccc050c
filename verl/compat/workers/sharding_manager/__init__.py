"""Public path of code for sharding managers, of which one is here; see :mod:`verl.base.absent`."""

from verl.base.doors import absent_names

__getattr__ = absent_names(__name__)
