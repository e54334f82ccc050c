"""Public path of code for models of Transformers, none of which is here; see :mod:`verl.compat.absent_names`."""
