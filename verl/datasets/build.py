"""Create data sets and samplers from the ``data`` section."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import Dataset, Sampler

from verl.base.import_utils import load_object, users_class
from verl.base.registry import Registry, suggest
from verl.config import BaseConfig, DataConfig
from verl.datasets.curriculum import DifficultyCurriculum
from verl.datasets.dynamicgen_dataset import DynamicGenDataset
from verl.datasets.mixing import WeightedSources
from verl.datasets.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.datasets.rl_dataset import RLHFDataset, check_item
from verl.datasets.rm_dataset import RMDataset
from verl.datasets.sampler import AbstractCurriculumSampler, InOrder, SeededShuffle
from verl.datasets.sft_dataset import SFTDataset
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.config import CustomClassConfig, PreferenceDataConfig, SamplerConfig, SFTDataConfig

logger = logging.getLogger(__name__)

SAMPLERS: Registry[type[Sampler]] = Registry("sampler")
"""Samplers that ``data.sampler.class_name`` can name without a ``class_path``."""
SAMPLERS.add("DifficultyCurriculum", DifficultyCurriculum)


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: DataConfig | Mapping[str, object],
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Dataset:
    """Create the prompt data set: :class:`RLHFDataset`, or the class that ``data.custom_cls`` names.

    Training prompts with ``data.datagen.path`` are a :class:`DynamicGenDataset` by default. A custom class is called as
    ``cls(files, tokenizer=..., config=..., processor=..., max_samples=...)`` and must be a torch ``Dataset``
    whose items are prompts (:func:`verl.datasets.rl_dataset.check_item`). Its ``config`` is the section as composed,
    with keys of its own. ``max_samples=-1`` keeps all rows.

    Raises:
        DataError: the data set is empty, or its items are no prompts.
    """
    section = DataConfig.from_mapping(data_config)
    grows = is_train and section.datagen.path is not None
    create = _dataset_class(section.custom_cls, DynamicGenDataset if grows else RLHFDataset)
    dataset = create(data_paths, tokenizer=tokenizer, config=data_config, processor=processor, max_samples=max_samples)
    if section.custom_cls.path:
        shown = f"custom_cls: {type(dataset).__name__}"
        if len(dataset) == 0:
            raise DataError(f"{shown} has no items.")
        check_item(dataset[0], shown)
    logger.info("%d prompts for %s", len(dataset), "training" if is_train else "validation")
    return dataset


def get_dataset_class(data_config: DataConfig | Mapping[str, object]) -> type[Dataset]:
    """Return the class of training prompts: the one that ``data.custom_cls`` names, or one of verl's."""
    section = DataConfig.from_mapping(data_config)
    default = DynamicGenDataset if section.datagen.path is not None else RLHFDataset
    return cast("type[Dataset]", _dataset_class(section.custom_cls, default))


def create_sft_dataset(
    data_paths: str | Sequence[str],
    data_config: SFTDataConfig | DictConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None = None,
    max_samples: int = -1,
) -> Dataset:
    """Create the data set of a supervised run.

    :class:`SFTDataset` if ``data.prompt_key`` and ``data.response_key`` are set, :class:`MultiTurnSFTDataset` if
    neither is, or the class that ``data.custom_cls`` names, called as
    ``cls(files, tokenizer=..., config=..., max_samples=...)``, with ``processor=...`` if the model takes images.
    ``max_samples=-1`` keeps all rows.
    """
    if bool(data_config.prompt_key) != bool(data_config.response_key):
        raise ConfigError(
            f"prompt_key={data_config.prompt_key} and response_key={data_config.response_key}: "
            "set both, or neither for conversations in messages_key."
        )
    default = SFTDataset if data_config.prompt_key else MultiTurnSFTDataset
    create = _dataset_class(data_config.custom_cls, default)
    image_arguments = {} if processor is None else {"processor": processor}
    return create(data_paths, tokenizer=tokenizer, config=data_config, max_samples=max_samples, **image_arguments)


def create_rm_dataset(
    data_paths: str | Sequence[str],
    data_config: PreferenceDataConfig | DictConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None = None,
    max_samples: int = -1,
) -> Dataset:
    """Create the data set of a preference run: :class:`RMDataset`, or the class that ``data.custom_cls`` names.

    A custom class is called as ``cls(files, tokenizer=..., config=..., max_samples=...)``, with ``processor=...`` if
    the model takes images. ``max_samples=-1`` keeps all pairs.
    """
    create = _dataset_class(data_config.custom_cls, RMDataset)
    image_arguments = {} if processor is None else {"processor": processor}
    return create(data_paths, tokenizer=tokenizer, config=data_config, max_samples=max_samples, **image_arguments)


def create_rl_sampler(data_config: BaseConfig | Mapping[str, object], dataset: Dataset) -> Sampler[int]:
    """Create the sampler of the training rows.

    By default a seeded shuffle, new in each epoch (no seed is seed 1), or the data set's order without
    ``data.shuffle``; ``data.source_weights`` mixes sources (:class:`WeightedSources`). The class that ``data.sampler``
    names replaces all of these; it is called as ``cls(data_source=dataset, data_config=data_config)``. A curriculum
    sampler must not read ahead, so ``data.dataloader_num_workers`` must be 0. Through the ``StatefulDataLoader``'s
    state a resumed run sees the rest of the interrupted epoch and the same following epochs.
    """
    config = data_config if isinstance(data_config, BaseConfig) else DataConfig.from_mapping(data_config)
    custom = config.get("sampler")
    if custom is not None and (custom.class_path or custom.class_name):
        create = users_class(_sampler_class(custom, config), "sampler")
        return create(data_source=dataset, data_config=data_config if custom.class_path else config)
    if config.get("source_weights"):
        return WeightedSources(cast(Sized, dataset), config)
    if not config["shuffle"]:
        return InOrder(cast(Sized, dataset))
    return SeededShuffle(cast(Sized, dataset), seed=1 if config["seed"] is None else config["seed"])


def _dataset_class(custom: CustomClassConfig, default: type[Dataset]) -> Any:
    if not custom.path:
        return default
    cls = load_object(custom.path, custom.name or "", "custom_cls.path", "custom_cls.name")
    if not (isinstance(cls, type) and issubclass(cls, Dataset)):
        raise ConfigError(
            f"custom_cls: '{custom.name}' in {custom.path} is not a class that inherits from "
            f"torch.utils.data.Dataset. Let it inherit from {default.__module__}.{default.__name__}, for example."
        )
    return users_class(cls, "custom_cls")


def _sampler_class(custom: SamplerConfig, data_config: Any) -> type[Sampler]:
    path, name = custom.class_path, custom.class_name or ""
    if path is None and name not in SAMPLERS:
        raise ConfigError(
            f"sampler.class_name='{name}': there is no such sampler.{suggest(name, list(SAMPLERS))} Set "
            f"sampler.class_path to your own file, or use one of: {', '.join(SAMPLERS)}."
        )
    if path is None:
        cls: object = SAMPLERS.get(name)
    else:
        cls = load_object(path, name, "sampler.class_path", "sampler.class_name")
    if not (isinstance(cls, type) and issubclass(cls, Sampler)):
        raise ConfigError(f"sampler: '{name}' in {path} is not a class that inherits from torch.utils.data.Sampler.")
    if not issubclass(cls, AbstractCurriculumSampler):
        if hasattr(cls, "update"):
            raise ConfigError(
                f"sampler: {name} has an 'update' method that is never called. Inherit from "
                "verl.experimental.dataset.sampler.AbstractCurriculumSampler, or remove the method."
            )
        return cls
    if data_config.dataloader_num_workers != 0:
        raise ConfigError(
            f"sampler: {name} learns from every batch, but dataloader_num_workers="
            f"{data_config.dataloader_num_workers} processes read rows ahead of it. Set dataloader_num_workers=0."
        )
    return cls
