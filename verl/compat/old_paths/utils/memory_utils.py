"""Free GPU memory, from :mod:`verl.compat.toolkit.memory`."""

from verl.compat.toolkit.memory import aggressive_empty_cache as aggressive_empty_cache
from verl.utils.device import get_device_name as get_device_name
