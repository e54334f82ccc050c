"""Free GPU memory, from :mod:`verl.compat.toolkit.memory`."""

from verl.compat.import_hooks import old_names
from verl.compat.toolkit.memory import aggressive_empty_cache as aggressive_empty_cache

__getattr__ = old_names(__name__)
