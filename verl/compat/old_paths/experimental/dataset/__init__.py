"""Public path of :mod:`verl.datasets.sampler`; see :mod:`verl.experimental.dataset.sampler`."""
