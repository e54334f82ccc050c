"""Public path of code for models of Transformers, none of which is here; see :mod:`verl.compat.absent_names`."""

from verl.compat.import_hooks import old_names

__getattr__ = old_names(__name__)
