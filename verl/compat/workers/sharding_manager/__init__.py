"""Public path of code for sharding managers, none of which is here; see :mod:`verl.base.absent`."""

from verl.base.doors import absent_names

__getattr__ = absent_names(__name__)
