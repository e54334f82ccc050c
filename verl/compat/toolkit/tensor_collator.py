"""Batches of supervised rows for a data loader of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils.data import default_collate

from verl.compat.toolkit.names import DatasetPadMode
from verl.errors import ConfigError


class SFTTensorCollator:
    """Collate function for items of :class:`~verl.datasets.MultiTurnSFTDataset` and the like.

    Without padding, tensors become jagged nested tensors, (bsz, length of each), and other values lists; padded items,
    all of one length, are stacked to (bsz, length).

    Args:
        pad_mode: how the data set has padded its items; a member of ``DatasetPadMode`` or its value.

    Raises:
        ConfigError: there is no such mode.
    """

    def __init__(self, pad_mode: DatasetPadMode | str = DatasetPadMode.LEFT_RIGHT) -> None:
        modes = [mode.value for mode in DatasetPadMode]
        if pad_mode not in modes:
            raise ConfigError(f"pad_mode='{pad_mode}' is unknown. Known: {', '.join(modes)}.")
        self.pad_mode = DatasetPadMode(pad_mode)

    def __call__(self, batch: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """Return the columns of a batch of items."""
        if self.pad_mode == DatasetPadMode.NO_PADDING:
            return self.collate_variable_batch(batch)
        return self.collate_fixed_batch(batch)

    def collate_variable_batch(self, batch: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """Collate items of different lengths."""
        columns: dict[str, object] = {}
        for name in dict.fromkeys(name for item in batch for name in item):
            values = [item.get(name) for item in batch]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            is_tensors = len(tensors) == len(values)
            columns[name] = torch.nested.as_nested_tensor(tensors, layout=torch.jagged) if is_tensors else values
        return columns

    def collate_fixed_batch(self, batch: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """Stack items of one length."""
        return default_collate(list(batch))
