"""Public path of the base class of reward managers; see :mod:`verl.base.absent`."""

from verl.base.doors import old_names

__getattr__ = old_names(__name__)
