"""Public path of the base class of reward managers; see :mod:`verl.compat.absent_names`."""

from verl.compat.import_hooks import old_names

__getattr__ = old_names(__name__)
