"""Metrics on the console, and log messages of one rank, from :mod:`verl.compat.toolkit.metrics`."""

from verl.compat.toolkit.metrics import LocalLogger as LocalLogger
from verl.compat.toolkit.metrics import log_with_rank as log_with_rank
