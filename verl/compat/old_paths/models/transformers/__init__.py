"""Public path of code for models of Transformers, none of which is here; see :mod:`verl.base.absent`."""

from verl.base.doors import old_names

__getattr__ = old_names(__name__)
