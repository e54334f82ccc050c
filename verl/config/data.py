"""Configuration of the data of PPO: prompts, their order, generated rows; and custom dataset classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from verl.config.base import BaseConfig, OneOrMany, section, setting, subsection
from verl.config.problems import Problem

Truncation = Literal["error", "left", "right", "middle"]


@section
class CustomClassConfig(BaseConfig):
    """A custom dataset class."""

    path: str | None = setting(None, path=True)
    """File with the class."""
    name: str | None = setting(None)
    """Name of the class; a torch Dataset."""


@section
class SamplerConfig(BaseConfig):
    """A sampler that adapts to the results of earlier batches, or your own."""

    class_path: str | None = setting(None, path=True)
    """File or module with the class; null uses a built-in one."""
    class_name: str | None = setting(None)
    """Name of the class; `DifficultyCurriculum` is built in."""


@section
class CurriculumConfig(BaseConfig):
    """Preferences of `DifficultyCurriculum` among the rows."""

    target_success: float = setting(0.5, gt=0, lt=1)
    """Success rate of the rows that are sampled most often."""
    sharpness: float = setting(4.0, ge=0)
    """Speed at which a row's weight falls with the distance of its success rate from the target; 0 weighs all equally.
    """
    decay: float = setting(0.5, ge=0, le=1)
    """Factor on the weight of a row's earlier outcomes each time it is sampled again."""
    success_score: float = setting(0.5)
    """A response with at least this score is a success."""
    revisit_epochs: float = setting(4.0, ge=1)
    """A row that was not sampled for this many epochs is sampled next, whatever its success rate."""


@section
class DatagenConfig(BaseConfig):
    """A generator of new rows between steps."""

    path: str | None = setting(None, path=True)
    """File or module with the class."""
    name: str | None = setting(None)
    """Name of the class, a subclass of AbstractDataGenerator."""


@section
class DataConfig(BaseConfig):
    """Prompts for training and validation."""

    train_files: Annotated[tuple[str, ...], OneOrMany] = setting(
        "~/data/rlhf/gsm8k/train.parquet", validate_default=True, path=True, remote=True
    )
    """Training files: parquet, json or jsonl; one path or a list."""
    val_files: Annotated[tuple[str, ...] | None, OneOrMany] = setting(
        "~/data/rlhf/gsm8k/test.parquet", validate_default=True, path=True, remote=True
    )
    """Validation files, in the same form; null or an empty list validates nothing."""
    use_shm: bool = setting(False)
    """Read data files from copies in shared memory (/dev/shm), made once on each machine if they fit there."""
    train_max_samples: int = setting(-1, ge=-1)
    """Use only this many training rows; -1 uses all."""
    val_max_samples: int = setting(-1, ge=-1)
    """Use only this many validation rows; -1 uses all."""
    prompt_key: str = setting("prompt")
    """Column of the prompt, a list of messages."""
    reward_fn_key: str = setting("data_source")
    """Column that chooses the scorer."""
    tools_key: str | None = setting("tools")
    """Column of tool descriptions shown in the prompt; null ignores it."""
    enable_thinking_key: str | None = setting("enable_thinking")
    """Column with the chat template's switch for thinking; null ignores it."""
    max_prompt_length: int = setting(512, ge=1)
    """Maximum length of a prompt, in tokens."""
    max_response_length: int = setting(512, ge=1)
    """Maximum length of a response, in tokens."""
    train_batch_size: int = setting(1024, ge=1)
    """Prompts per step."""
    gen_batch_size: int | None = setting(None, ge=1, interpolation="${data.train_batch_size}")
    """Prompts sampled at once with dynamic sampling (`algorithm.filter_groups`); null uses `train_batch_size`."""
    val_batch_size: int | None = setting(None, ge=1)
    """Prompts per validation batch; null uses the whole validation set at once."""
    return_raw_input_ids: bool = setting(False)
    """Add the prompt's token ids before truncation to the batch."""
    return_raw_chat: bool = setting(True)
    """Add the prompt's messages to the batch."""
    return_full_prompt: bool = setting(False)
    """Add the prompt's text, with the chat template applied, to the batch."""
    shuffle: bool = setting(True)
    """Shuffle training rows at every epoch."""
    seed: int | None = setting(None, ge=0)
    """Seed of that shuffle; null uses `trainer.seed`."""
    dataloader_num_workers: int = setting(8, ge=0)
    """Processes that read rows."""
    validation_shuffle: bool = setting(False)
    """Shuffle validation rows."""
    filter_overlong_prompts: bool = setting(False)
    """Drop prompts longer than `max_prompt_length` when the files are read."""
    filter_overlong_prompts_workers: int = setting(1, ge=1)
    """Processes that measure the length of prompts for that filter."""
    truncation: Truncation = setting("error")
    """Treatment of a longer prompt: an error, or truncation on the left, on the right or in the middle."""
    image_key: str = setting("images")
    """Column of images, a list in each row, for models with an image processor (docs/images.md)."""
    video_key: str = setting("videos")
    """Column of videos, a list in each row, for models with an image processor (docs/images.md)."""
    custom_cls: CustomClassConfig = subsection(CustomClassConfig)
    """A custom dataset class."""
    sampler: SamplerConfig = subsection(SamplerConfig)
    """A sampler that adapts to the results of earlier batches, or your own."""
    curriculum: CurriculumConfig = subsection(CurriculumConfig)
    """Preferences of the built-in curriculum among the rows."""
    source_weights: dict[str, float] = setting(factory=dict)
    """Weight of each data source, for its share of every batch; empty treats all files as one source."""
    datagen: DatagenConfig = subsection(DatagenConfig)
    """A generator of new rows."""
    apply_chat_template_kwargs: dict[str, object] = setting(factory=dict)
    """Further arguments of the chat template, such as `enable_thinking`."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Source weights are usable, and generated rows have a generator, a data set for them and no early reader."""
        weights, sampler, datagen = self.source_weights, self.sampler, self.datagen
        if weights and (sampler.class_path or sampler.class_name):
            remedy = f"set one of the two; a sampler of your own can read {path}.source_weights itself"
            cause = f"{path}.sampler decides the order of the rows, so nothing would use the weights"
            yield Problem(f"{path}.source_weights", dict(weights), cause, remedy=remedy)
        for source, weight in weights.items():
            if not 0 <= weight < float("inf"):
                yield Problem(f"{path}.source_weights.{source}", weight, "a weight is no share", "a number >= 0")
        if weights and not sum(weights.values()) > 0:
            cause = "no source has a positive weight"
            yield Problem(f"{path}.source_weights", dict(weights), cause, remedy="give one at least")
        if datagen.path is None and datagen.name is not None:
            remedy = f"set {path}.datagen.path to the file that holds it"
            yield Problem(f"{path}.datagen.name", datagen.name, f"{path}.datagen.path is not set", remedy=remedy)
        if datagen.path is not None and self.custom_cls.path is not None:
            cause = f"{path}.custom_cls replaces the data set that would take the generated rows"
            remedy = (
                "set one of the two; a class of your own can inherit from DynamicGenDataset and be its own generator"
            )
            yield Problem(f"{path}.datagen.path", datagen.path, cause, remedy=remedy)
        if datagen.path is not None:
            yield from self.reads_ahead(path, f"{path}.datagen")

    def reads_ahead(self, path: str, why: str) -> Iterator[Problem]:
        """Report loader processes, which read rows before ``why`` can choose or add them."""
        if self.dataloader_num_workers != 0:
            cause = f"these processes read rows ahead of the step that {why} has to see first"
            key = f"{path}.dataloader_num_workers"
            yield Problem(key, self.dataloader_num_workers, cause, "0", f"set {key}=0")
