"""Public names of :mod:`verl.algorithms` under their established import path."""

from typing import TYPE_CHECKING

from verl.algorithms import *  # noqa: F403
from verl.algorithms import __all__ as __all__
from verl.compat.import_hooks import old_names

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = old_names(__name__)
