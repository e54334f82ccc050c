"""Free GPU memory, from :mod:`verl.toolkit.memory`."""

from verl.base.doors import absent_names
from verl.toolkit.memory import aggressive_empty_cache as aggressive_empty_cache

__getattr__ = absent_names(__name__)
