"""Paddings of supervised data, from :mod:`verl.toolkit.names`."""

from verl.base.doors import old_names
from verl.toolkit.names import DatasetPadMode as DatasetPadMode

__getattr__ = old_names(__name__)
