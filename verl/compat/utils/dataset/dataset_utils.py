"""Paddings of supervised data, from :mod:`verl.toolkit.names`."""

from verl.base.doors import absent_names
from verl.toolkit.names import DatasetPadMode as DatasetPadMode

__getattr__ = absent_names(__name__)
