"""Activations in CPU memory, from :mod:`verl.toolkit.memory`."""

from verl.base.doors import old_names
from verl.toolkit.memory import enable_activation_offloading as enable_activation_offloading

__getattr__ = old_names(__name__)
