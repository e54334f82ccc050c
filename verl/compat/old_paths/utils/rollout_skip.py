"""Responses from files, from :mod:`verl.compat.toolkit.rollouts`."""

from verl.compat.toolkit.rollouts import RolloutSkip as RolloutSkip
from verl.compat.toolkit.rollouts import wrap_generate_sequences as wrap_generate_sequences
