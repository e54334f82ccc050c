"""Public names of :mod:`verl.algorithms` under their established import path."""

from verl.algorithms import *  # noqa: F403
from verl.algorithms import __all__ as __all__
from verl.base.doors import old_names

__getattr__ = old_names(__name__)
