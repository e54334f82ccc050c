"""Paddings and batches of supervised data, from ``names`` and ``tensor_collator`` of :mod:`verl.compat.toolkit`."""

from verl.compat.toolkit.names import DatasetPadMode as DatasetPadMode
from verl.compat.toolkit.tensor_collator import SFTTensorCollator as SFTTensorCollator
