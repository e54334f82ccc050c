"""Public path of the base class of reward managers; see :mod:`verl.compat.absent_names`."""
