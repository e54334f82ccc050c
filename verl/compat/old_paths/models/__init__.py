"""Public path of code for models, none of which is here; see :mod:`verl.compat.absent_names`."""
