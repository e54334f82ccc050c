"""Public path of code for sharding managers, of which one is here; see :mod:`verl.compat.absent_names`."""

from verl.compat.import_hooks import old_names

__getattr__ = old_names(__name__)
