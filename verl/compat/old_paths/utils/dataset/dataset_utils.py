"""Paddings and batches of supervised data, from :mod:`verl.compat.toolkit.names` and :mod:`verl.compat.toolkit.tensor_collator`."""

from verl.compat.import_hooks import old_names
from verl.compat.toolkit.names import DatasetPadMode as DatasetPadMode
from verl.compat.toolkit.tensor_collator import SFTTensorCollator as SFTTensorCollator

__getattr__ = old_names(__name__)
