"""Metrics on the console, and log messages of one rank, from :mod:`verl.toolkit.metrics`."""

from verl.toolkit.metrics import LocalLogger as LocalLogger
from verl.toolkit.metrics import log_with_rank as log_with_rank
