"""Responses from files, from :mod:`verl.toolkit.rollouts`."""

from verl.base.doors import old_names
from verl.toolkit.rollouts import RolloutSkip as RolloutSkip

__getattr__ = old_names(__name__)
