"""From the ``data`` section to a data set of prompts and the order in which it is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import Dataset, Sampler, SequentialSampler

from verl.errors import ConfigError
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.sampler import SeededShuffle
from verl.utils.import_utils import load_object

if TYPE_CHECKING:
    from verl.trainer.config import DataConfig

logger = logging.getLogger(__name__)


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: DataConfig,
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Dataset:
    """The data set of prompts: :class:`RLHFDataset`, or the class that ``data.custom_cls`` names.

    A custom class is called as ``cls(data_files=..., tokenizer=..., config=..., processor=...,
    max_samples=...)``; its items must have the columns of :class:`RLHFDataset`.

    Args:
        data_paths: ``data.train_files`` or ``data.val_files``.
        data_config: the ``data`` section.
        tokenizer: tokenizer of the policy.
        processor: multi-modal processor, if any.
        is_train: whether these prompts are trained on, for the log.
        max_samples: keep only so many prompts; -1 keeps all.

    Raises:
        ConfigError: ``data.custom_cls`` names no class, or one that is not a torch ``Dataset``.
        DataError: the files cannot be used.
    """
    cls: Any = RLHFDataset
    custom = data_config.custom_cls
    if custom is not None and custom.path:
        cls = load_object(custom.path, custom.name or "", "data.custom_cls")
        if not (isinstance(cls, type) and issubclass(cls, Dataset)):
            raise ConfigError(
                f"data.custom_cls: '{custom.name}' in {custom.path} is not a class that inherits from "
                "torch.utils.data.Dataset. Let it inherit from verl.utils.dataset.rl_dataset.RLHFDataset, for example."
            )
    dataset = cls(
        data_files=data_paths, tokenizer=tokenizer, config=data_config, processor=processor, max_samples=max_samples
    )
    logger.info("%s: %d prompts", "data.train_files" if is_train else "data.val_files", len(dataset))
    return dataset


def create_rl_sampler(data_config: DataConfig, dataset: Dataset) -> Sampler[int]:
    """The order of the training prompts: a seeded shuffle, new in each epoch, or as they stand.

    The state of the shuffle is part of a ``StatefulDataLoader``'s state, so a resumed run sees
    the rest of the epoch that was interrupted, and then the epochs that would have followed.

    Args:
        data_config: ``shuffle`` and ``seed`` of the ``data`` section; no seed is seed 1.
        dataset: the data set to be read.
    """
    if not data_config.shuffle:
        return SequentialSampler(cast(Sized, dataset))
    return SeededShuffle(cast(Sized, dataset), seed=1 if data_config.seed is None else data_config.seed)
