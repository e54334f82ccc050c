"""Public path of :mod:`verl.utils.dataset.sampler`; see :mod:`verl.experimental.dataset.sampler`."""
