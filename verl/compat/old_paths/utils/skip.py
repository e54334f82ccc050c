"""Responses from files, from :mod:`verl.compat.toolkit.rollouts`."""

from verl.compat.toolkit.rollouts import RolloutSkip as RolloutSkip
