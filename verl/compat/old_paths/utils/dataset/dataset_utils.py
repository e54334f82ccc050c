"""Paddings and batches of supervised data, from :mod:`verl.toolkit.names` and :mod:`verl.toolkit.tensor_collator`."""

from verl.base.doors import old_names
from verl.toolkit.names import DatasetPadMode as DatasetPadMode
from verl.toolkit.tensor_collator import SFTTensorCollator as SFTTensorCollator

__getattr__ = old_names(__name__)
