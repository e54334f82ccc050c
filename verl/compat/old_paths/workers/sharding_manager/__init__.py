"""Public path of code for sharding managers, of which one is here; see :mod:`verl.compat.absent_names`."""
