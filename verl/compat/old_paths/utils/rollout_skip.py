"""Responses from files, from :mod:`verl.compat.toolkit.rollouts`."""

from verl.compat.import_hooks import old_names
from verl.compat.toolkit.rollouts import RolloutSkip as RolloutSkip
from verl.compat.toolkit.rollouts import wrap_generate_sequences as wrap_generate_sequences

__getattr__ = old_names(__name__)
