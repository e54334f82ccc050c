"""Statistics over groups of samples, from :mod:`verl.algorithms.groups`."""

from verl.algorithms.groups import as_torch_index as as_torch_index
from verl.algorithms.groups import group_mean_std as group_mean_std
