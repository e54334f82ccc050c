"""The whole configuration of ``python -m verl.trainer.sft_trainer``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from verl.base_config import BaseConfig, OneOrMany, section, setting, subsection
from verl.trainer.config.config import RayConfig
from verl.trainer.config.data import CustomClassConfig, Truncation
from verl.trainer.config.trainer import SFTTrainerConfig
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.config.engine import FSDPEngineConfig
from verl.workers.config.model import NO_SHM, HFModelConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig


@section
class SFTDataConfig(BaseConfig):
    """Conversations, or pairs of prompt and response."""

    train_files: Annotated[tuple[str, ...], OneOrMany] = setting(
        "~/data/gsm8k/train.parquet", validate_default=True, path=True
    )
    """Training files: parquet, json or jsonl; one path or a list."""
    val_files: Annotated[tuple[str, ...] | None, OneOrMany] = setting(None, path=True)
    """Validation files, likewise; null validates nothing."""
    train_max_samples: int = setting(-1, ge=-1)
    """Use only this many training rows; -1 uses all."""
    val_max_samples: int = setting(-1, ge=-1)
    """Use only this many validation rows; -1 uses all."""
    train_batch_size: int = setting(256, ge=1)
    """Sequences per optimizer step over all ranks."""
    micro_batch_size_per_gpu: int | None = setting(4, ge=1)
    """Sequences per forward and backward pass on one rank."""
    micro_batch_size: int | None = setting(None, ge=1)
    """Older form of it: sequences per pass over all ranks together."""
    use_dynamic_bsz: bool = setting(True)
    """Fill passes by tokens instead of by sequences."""
    max_token_len_per_gpu: int = setting(8192, ge=1)
    """Tokens per pass on one rank, with `use_dynamic_bsz`."""
    messages_key: str = setting("messages")
    """Column of the conversation; the loss is on what the assistant says."""
    tools_key: str = setting("tools")
    """Column of the tools shown to the assistant."""
    enable_thinking_key: str = setting("enable_thinking")
    """Column that tells the chat template whether the assistant thinks."""
    prompt_key: str | None = setting(None)
    """Column of a single prompt; with `response_key` it replaces `messages_key`."""
    response_key: str | None = setting(None)
    """Column of its response; the loss is on it."""
    prompt_dict_keys: Annotated[tuple[str, ...], OneOrMany] = setting(())
    """Keys to follow inside `prompt_key`."""
    response_dict_keys: Annotated[tuple[str, ...], OneOrMany] = setting(())
    """Keys to follow inside `response_key`."""
    pad_mode: Literal["no_padding", "right"] = setting("no_padding")
    """Batches without padding, or padded at the right to `max_length`."""
    max_length: int = setting(1024, ge=2)
    """Longest sequence in tokens."""
    truncation: Truncation = setting("error")
    """What happens to a longer sequence: an error, or a cut at the left, right or middle."""
    balance_dp_token: bool = setting(False)
    """Order sequences so that ranks get nearly equal numbers of tokens."""
    shuffle: bool = setting(True)
    """Shuffle training rows at every epoch."""
    seed: int | None = setting(1, ge=0, interpolation="${oc.select:trainer.seed,1}")
    """Seed of that shuffle, as in `trainer.seed`."""
    ignore_input_ids_mismatch: bool = setting(False)
    """Accept conversations whose turns tokenise otherwise alone than as a whole."""
    apply_chat_template_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments of the chat template."""
    num_workers: int = setting(8, ge=0)
    """Processes that read rows."""
    use_shm: bool = setting(False, refuse=NO_SHM)
    """Copy the files into shared memory."""
    custom_cls: CustomClassConfig = subsection(CustomClassConfig)
    """A dataset class of your own."""


@section
class SFTConfig(BaseConfig):
    """Supervised fine-tuning: data, model, optimizer, run."""

    data: SFTDataConfig = subsection(SFTDataConfig)
    """Conversations."""
    model: HFModelConfig = subsection(HFModelConfig)
    """The model that is trained."""
    engine: FSDPEngineConfig = subsection(FSDPEngineConfig)
    """Sharding, precision, offload."""
    optim: FSDPOptimizerConfig = subsection(lambda: FSDPOptimizerConfig(lr=1e-5, lr_scheduler_type="cosine"))
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = subsection(CheckpointConfig)
    """What a checkpoint holds."""
    trainer: SFTTrainerConfig = subsection(SFTTrainerConfig)
    """The run."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """How Ray is started."""
