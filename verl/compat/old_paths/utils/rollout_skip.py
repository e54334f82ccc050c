"""Responses from files, from :mod:`verl.toolkit.rollouts`."""

from verl.base.doors import old_names
from verl.toolkit.rollouts import RolloutSkip as RolloutSkip
from verl.toolkit.rollouts import wrap_generate_sequences as wrap_generate_sequences

__getattr__ = old_names(__name__)
