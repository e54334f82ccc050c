"""Free GPU memory, from :mod:`verl.toolkit.memory`."""

from verl.base.doors import old_names
from verl.toolkit.memory import aggressive_empty_cache as aggressive_empty_cache

__getattr__ = old_names(__name__)
