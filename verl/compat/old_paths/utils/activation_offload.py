"""Activations in CPU memory, from :mod:`verl.compat.toolkit.memory`."""

from verl.compat.toolkit.memory import enable_activation_offloading as enable_activation_offloading
