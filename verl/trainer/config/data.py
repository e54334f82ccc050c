"""Prompts: where they lie, how they are read and cut."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from verl.base_config import BaseConfig, OneOrMany, section, setting, subsection
from verl.workers.config.model import NO_SHM

Truncation = Literal["error", "left", "right", "middle"]

NO_VISION = "images and videos are not in this version"


@section
class CustomClassConfig(BaseConfig):
    """A dataset class of your own."""

    path: str | None = setting(None, path=True)
    """File that holds the class."""
    name: str | None = setting(None)
    """Name of the class; a torch Dataset."""


@section
class SamplerConfig(BaseConfig):
    """A sampler that learns from the batches, or one of your own."""

    class_path: str | None = setting(None, path=True)
    """File or module that holds the class; null takes a built-in one."""
    class_name: str | None = setting(None)
    """Name of the class; built in is `DifficultyCurriculum`."""


@section
class CurriculumConfig(BaseConfig):
    """Which rows `DifficultyCurriculum` draws more often."""

    target_success: float = setting(0.5, gt=0, lt=1)
    """Success rate of the rows that are drawn most readily."""
    sharpness: float = setting(4.0, ge=0)
    """How quickly a row is drawn less when its success rate is away from the target; 0 draws all alike."""
    decay: float = setting(0.5, ge=0, le=1)
    """What earlier outcomes of a row count after each further visit."""
    success_score: float = setting(0.5)
    """A response with this score or more is a success."""
    revisit_epochs: float = setting(4.0, ge=1)
    """A row that was not drawn for so many epochs is drawn next, whatever its success rate."""


@section
class DatagenConfig(BaseConfig):
    """A generator of new rows between steps."""

    path: str | None = setting(None, path=True)
    """File or module that holds the class."""
    name: str | None = setting(None)
    """Name of the class, an AbstractDataGenerator."""


@section
class DataConfig(BaseConfig):
    """Prompts for training and validation."""

    tokenizer: str | None = setting(None)
    """Older name of `actor_rollout_ref.model.tokenizer_path`."""
    use_shm: bool = setting(False, refuse=NO_SHM)
    """Copy the files into shared memory."""
    train_files: Annotated[tuple[str, ...], OneOrMany] = setting(
        "~/data/rlhf/gsm8k/train.parquet", validate_default=True, path=True
    )
    """Training files: parquet, json or jsonl; one path or a list."""
    val_files: Annotated[tuple[str, ...], OneOrMany] = setting(
        "~/data/rlhf/gsm8k/test.parquet", validate_default=True, path=True
    )
    """Validation files, likewise."""
    train_max_samples: int = setting(-1, ge=-1)
    """Use only this many training rows; -1 uses all."""
    val_max_samples: int = setting(-1, ge=-1)
    """Use only this many validation rows; -1 uses all."""
    prompt_key: str = setting("prompt")
    """Column of the prompt, a list of messages."""
    reward_fn_key: str = setting("data_source")
    """Column that chooses the scorer."""
    max_prompt_length: int = setting(512, ge=1)
    """Longest prompt in tokens."""
    max_response_length: int = setting(512, ge=1)
    """Longest response in tokens."""
    train_batch_size: int = setting(1024, ge=1)
    """Prompts per step."""
    gen_batch_size: int | None = setting(None, ge=1)
    """Prompts sampled at once with dynamic sampling (`algorithm.filter_groups`); null takes `train_batch_size`."""
    val_batch_size: int | None = setting(None, ge=1)
    """Prompts per validation batch; null takes the whole validation set at once."""
    return_raw_input_ids: bool = setting(False)
    """Add the prompt's ids before truncation."""
    return_raw_chat: bool = setting(True)
    """Add the prompt's messages."""
    return_full_prompt: bool = setting(False)
    """Add the prompt's text with its chat template."""
    shuffle: bool = setting(True)
    """Shuffle training rows at every epoch."""
    seed: int | None = setting(None, ge=0)
    """Seed of that shuffle; null takes 1."""
    dataloader_num_workers: int = setting(8, ge=0)
    """Processes that read rows."""
    image_patch_size: int = setting(14, ge=1, hint=NO_VISION)
    """Patch size of the vision encoder."""
    validation_shuffle: bool = setting(False)
    """Shuffle validation rows."""
    filter_overlong_prompts: bool = setting(False)
    """Drop prompts longer than `max_prompt_length` when the files are read."""
    filter_overlong_prompts_workers: int = setting(1, ge=1)
    """Processes that measure prompts."""
    truncation: Truncation = setting("error")
    """What happens to a longer prompt: an error, or a cut at the left, right or middle."""
    image_key: str = setting("images")
    """Column of images; rows that have any are refused in this version."""
    video_key: str = setting("videos")
    """Column of videos; rows that have any are refused in this version."""
    trust_remote_code: bool = setting(
        False, hint="actor_rollout_ref.model.trust_remote_code holds for the tokenizer too"
    )
    """Run Python code that comes with the tokenizer."""
    custom_cls: CustomClassConfig = subsection(CustomClassConfig)
    """A dataset class of your own."""
    return_multi_modal_inputs: bool = setting(True, hint=NO_VISION)
    """Add the processed images to each row."""
    sampler: SamplerConfig = subsection(SamplerConfig)
    """A sampler that learns from the batches, or one of your own."""
    curriculum: CurriculumConfig = subsection(CurriculumConfig)
    """Which rows the built-in curriculum draws more often."""
    source_weights: dict[str, float] = setting(factory=dict)
    """Share of each data source in every batch, by weight; empty reads the files as one."""
    datagen: DatagenConfig = subsection(DatagenConfig)
    """A generator of new rows."""
    apply_chat_template_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments of the chat template, such as `enable_thinking`."""
    tool_config_path: str | None = setting(
        None,
        interpolation="${oc.select:actor_rollout_ref.rollout.multi_turn.tool_config_path, null}",
        refuse="tools are not in this version; leave it null",
    )
    """File that lists the tools shown in the prompt."""


@section
class PreferenceDataConfig(BaseConfig):
    """Pairs of responses to one prompt, the better one and the worse one."""

    train_files: Annotated[tuple[str, ...], OneOrMany] = setting(
        "~/data/preference/train.parquet", validate_default=True, path=True
    )
    """Training files: parquet, json or jsonl; one path or a list."""
    val_files: Annotated[tuple[str, ...] | None, OneOrMany] = setting(None, path=True)
    """Validation files, likewise; null validates nothing."""
    train_max_samples: int = setting(-1, ge=-1)
    """Use only this many training pairs; -1 uses all."""
    val_max_samples: int = setting(-1, ge=-1)
    """Use only this many validation pairs; -1 uses all."""
    train_batch_size: int = setting(256, ge=1)
    """Pairs per optimizer step over all ranks."""
    micro_batch_size_per_gpu: int | None = setting(4, ge=1)
    """Pairs per forward and backward pass on one rank."""
    use_dynamic_bsz: bool = setting(True)
    """Fill passes by tokens instead of by pairs."""
    max_token_len_per_gpu: int = setting(8192, ge=1)
    """Tokens per pass on one rank, with `use_dynamic_bsz`; both sides of a pair count."""
    prompt_key: str | None = setting("prompt")
    """Column of the prompt, text or messages; null where both sides are whole conversations."""
    chosen_key: str = setting("chosen")
    """Column of the better response, text or messages."""
    rejected_key: str = setting("rejected")
    """Column of the worse response, text or messages."""
    max_length: int = setting(1024, ge=2)
    """Longest sequence, prompt and response, in tokens."""
    truncation: Literal["error", "left", "right"] = setting("error")
    """What happens to a longer pair: an error, or a cut of both sides, of the prompt (left) or of the ends (right)."""
    balance_dp_token: bool = setting(False)
    """Order pairs so that ranks get nearly equal numbers of tokens."""
    shuffle: bool = setting(True)
    """Shuffle training pairs at every epoch."""
    seed: int | None = setting(1, ge=0, interpolation="${oc.select:trainer.seed,1}")
    """Seed of that shuffle, as in `trainer.seed`."""
    ignore_input_ids_mismatch: bool = setting(False)
    """Accept conversations whose turns tokenise otherwise alone than as a whole."""
    apply_chat_template_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments of the chat template."""
    num_workers: int = setting(8, ge=0)
    """Processes that read rows."""
    custom_cls: CustomClassConfig = subsection(CustomClassConfig)
    """A dataset class of your own."""
