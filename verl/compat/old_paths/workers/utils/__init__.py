"""Public path of helpers of workers; see :mod:`verl.workers.utils.padding`."""
