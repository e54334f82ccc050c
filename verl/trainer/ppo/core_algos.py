"""Public names of :mod:`verl.algorithms` under their established import path."""

from verl.algorithms import *  # noqa: F403
from verl.algorithms import __all__ as __all__
