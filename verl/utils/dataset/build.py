"""From the ``data`` section to a data set of prompts and the order in which it is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import Dataset, Sampler

from verl.errors import ConfigError
from verl.utils.dataset.curriculum import DifficultyCurriculum
from verl.utils.dataset.dynamicgen_dataset import DynamicGenDataset
from verl.utils.dataset.mixing import WeightedSources
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.rm_dataset import RMDataset
from verl.utils.dataset.sampler import AbstractCurriculumSampler, InOrder, SeededShuffle
from verl.utils.dataset.sft_dataset import SFTDataset
from verl.utils.import_utils import load_object
from verl.utils.registry import suggest

if TYPE_CHECKING:
    from verl.trainer.config import DataConfig, SFTDataConfig
    from verl.trainer.config.data import CustomClassConfig, PreferenceDataConfig, SamplerConfig

logger = logging.getLogger(__name__)

SAMPLERS: dict[str, type[Sampler]] = {"DifficultyCurriculum": DifficultyCurriculum}
"""Samplers that ``data.sampler.class_name`` names without a ``class_path``."""


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: DataConfig,
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Dataset:
    """The data set of prompts: :class:`RLHFDataset`, or the class that ``data.custom_cls`` names.

    Training prompts with ``data.datagen.path`` are a :class:`DynamicGenDataset`, which grows.

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
    grows = is_train and data_config.datagen.path is not None
    cls = _dataset_class(data_config.custom_cls, DynamicGenDataset if grows else RLHFDataset)
    dataset = cls(
        data_files=data_paths, tokenizer=tokenizer, config=data_config, processor=processor, max_samples=max_samples
    )
    logger.info("%s: %d prompts", "data.train_files" if is_train else "data.val_files", len(dataset))
    return dataset


def create_sft_dataset(
    data_paths: str | Sequence[str], data_config: SFTDataConfig, tokenizer: Any, max_samples: int = -1
) -> Dataset:
    """The data set of a supervised run.

    :class:`SFTDataset` if ``data.prompt_key`` is set, :class:`MultiTurnSFTDataset` if it is not, or the
    class that ``data.custom_cls`` names, called with the same arguments.

    Args:
        data_paths: ``data.train_files`` or ``data.val_files``.
        data_config: the ``data`` section.
        tokenizer: tokenizer of the model.
        max_samples: keep only so many rows; -1 keeps all.

    Raises:
        ConfigError: ``data.custom_cls`` is no data set, or only one of the two keys is set.
        DataError: the files cannot be used.
    """
    if bool(data_config.prompt_key) != bool(data_config.response_key):
        raise ConfigError(
            f"data.prompt_key={data_config.prompt_key} and data.response_key={data_config.response_key}: "
            "set both, or neither for conversations in data.messages_key."
        )
    default = SFTDataset if data_config.prompt_key else MultiTurnSFTDataset
    cls = _dataset_class(data_config.custom_cls, default)
    return cls(data_files=data_paths, tokenizer=tokenizer, config=data_config, max_samples=max_samples)


def create_rm_dataset(
    data_paths: str | Sequence[str], data_config: PreferenceDataConfig, tokenizer: Any, max_samples: int = -1
) -> Dataset:
    """The data set of pairs that the configuration asks for: ``data.custom_cls``, else ``RMDataset``.

    Args:
        data_paths: ``data.train_files`` or ``data.val_files``.
        data_config: the ``data`` section of a preference run.
        tokenizer: of the model.
        max_samples: keep only so many pairs; -1 keeps all.

    Raises:
        ConfigError: ``data.custom_cls`` is no data set.
        DataError: the files cannot be used.
    """
    cls = _dataset_class(data_config.custom_cls, RMDataset)
    return cls(parquet_files=data_paths, tokenizer=tokenizer, config=data_config, max_samples=max_samples)


def create_rl_sampler(data_config: DataConfig | SFTDataConfig | PreferenceDataConfig, dataset: Dataset) -> Sampler[int]:
    """The order of the training rows: a seeded shuffle, new in each epoch, or as they stand.

    The state of the order is part of a ``StatefulDataLoader``'s state, so a resumed run sees
    the rest of the epoch that was interrupted, and then the epochs that would have followed.
    ``data.source_weights`` mixes sources (:class:`WeightedSources`). The class that
    ``data.sampler`` names takes the place of all that; it is called as
    ``cls(data_source=dataset, data_config=data_config)``.

    Args:
        data_config: ``shuffle``, ``seed``, ``source_weights`` and ``sampler`` of the ``data`` section; no seed
            is seed 1.
        dataset: the data set to be read.

    Raises:
        ConfigError: ``data.sampler`` names no class, or one that is not a torch ``Sampler``; it learns from
            the batches, but rows are read ahead; weights and data name other sources.
    """
    custom = data_config.get("sampler")
    if custom is not None and (custom.class_path or custom.class_name):
        return _sampler_class(custom, data_config)(data_source=dataset, data_config=data_config)
    if data_config.get("source_weights"):
        return WeightedSources(cast(Sized, dataset), data_config)
    if not data_config.shuffle:
        return InOrder(cast(Sized, dataset))
    return SeededShuffle(cast(Sized, dataset), seed=1 if data_config.seed is None else data_config.seed)


def _dataset_class(custom: CustomClassConfig, default: type[Dataset]) -> Any:
    if not custom.path:
        return default
    cls = load_object(custom.path, custom.name or "", "data.custom_cls")
    if not (isinstance(cls, type) and issubclass(cls, Dataset)):
        raise ConfigError(
            f"data.custom_cls: '{custom.name}' in {custom.path} is not a class that inherits from "
            f"torch.utils.data.Dataset. Let it inherit from {default.__module__}.{default.__name__}, for example."
        )
    return cls


def _sampler_class(custom: SamplerConfig, data_config: Any) -> Any:
    path, name = custom.class_path, custom.class_name or ""
    if path is None and name not in SAMPLERS:
        raise ConfigError(
            f"data.sampler.class_name='{name}': there is no such sampler.{suggest(name, list(SAMPLERS))} "
            f"Set data.sampler.class_path to the file of your own, or take one of: {', '.join(SAMPLERS)}."
        )
    cls: Any = SAMPLERS[name] if path is None else load_object(path, name, "data.sampler")
    if not (isinstance(cls, type) and issubclass(cls, Sampler)):
        raise ConfigError(
            f"data.sampler: '{name}' in {path} is not a class that inherits from torch.utils.data.Sampler."
        )
    if not issubclass(cls, AbstractCurriculumSampler):
        if hasattr(cls, "update"):
            raise ConfigError(
                f"data.sampler: {name} has an 'update' method, which nothing would call. Let it inherit from "
                "verl.experimental.dataset.sampler.AbstractCurriculumSampler, or take the method out."
            )
        return cls
    if data_config.dataloader_num_workers != 0:
        raise ConfigError(
            f"data.sampler: {name} learns from every batch, but data.dataloader_num_workers="
            f"{data_config.dataloader_num_workers} processes read rows ahead of it. Set data.dataloader_num_workers=0."
        )
    return cls
