"""Activations in CPU memory, from :mod:`verl.compat.toolkit.memory`."""

from verl.compat.import_hooks import old_names
from verl.compat.toolkit.memory import enable_activation_offloading as enable_activation_offloading

__getattr__ = old_names(__name__)
