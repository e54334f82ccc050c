"""Activations in CPU memory, from :mod:`verl.toolkit.memory`."""

from verl.base.doors import absent_names
from verl.toolkit.memory import enable_activation_offloading as enable_activation_offloading

__getattr__ = absent_names(__name__)
