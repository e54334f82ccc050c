"""Metrics on the console, and log messages of one rank, from :mod:`verl.toolkit.metrics`."""

from verl.base.doors import old_names
from verl.toolkit.metrics import LocalLogger as LocalLogger
from verl.toolkit.metrics import log_with_rank as log_with_rank

__getattr__ = old_names(__name__)
