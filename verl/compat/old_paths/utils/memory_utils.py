"""Free GPU memory, from :mod:`verl.compat.toolkit.memory`."""

from verl.compat.toolkit.memory import aggressive_empty_cache as aggressive_empty_cache
