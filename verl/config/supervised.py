"""Sections that are common to training on existing responses: supervised fine-tuning, reward models, direct
preferences.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from verl.config.base import INTERNAL, BaseConfig, OneOrMany, section, setting, subsection
from verl.config.data import CustomClassConfig, Truncation
from verl.config.megatron import DistributedModel, McoreEngineConfig
from verl.config.model import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.config.trainer import RayConfig, SFTTrainerConfig


@section
class SupervisedDataConfig(BaseConfig):
    """Rows of existing responses: a conversation each, or a pair of responses."""

    train_files: Annotated[tuple[str, ...], OneOrMany] = setting(
        "~/data/gsm8k/train.parquet", validate_default=True, path=True, remote=True
    )
    """Training files: parquet, json or jsonl; one path or a list."""
    val_files: Annotated[tuple[str, ...] | None, OneOrMany] = setting(None, path=True, remote=True)
    """Validation files, in the same form; null or an empty list validates nothing."""
    use_shm: bool = setting(False)
    """Read data files from copies in shared memory (/dev/shm), made once on each machine if they fit there."""
    train_max_samples: int = setting(-1, ge=-1)
    """Use only this many training rows; -1 uses all."""
    val_max_samples: int = setting(-1, ge=-1)
    """Use only this many validation rows; -1 uses all."""
    train_batch_size: int = setting(256, ge=1)
    """Rows per optimizer step over all ranks."""
    micro_batch_size_per_gpu: int | None = setting(4, ge=1)
    """Rows per forward and backward pass on one rank."""
    use_dynamic_bsz: bool = setting(True)
    """Fill micro-batches by tokens instead of by rows."""
    max_token_len_per_gpu: int = setting(8192, ge=1)
    """Tokens per pass on one rank, with `use_dynamic_bsz`."""
    max_length: int = setting(1024, ge=2)
    """Maximum length of a sequence in tokens, prompt and response together."""
    truncation: Truncation = setting("error")
    """Treatment of a longer sequence: an error, or truncation on the left, on the right or in the middle."""
    balance_dp_token: bool = setting(False)
    """Order rows so that ranks get nearly equal numbers of tokens."""
    shuffle: bool = setting(True)
    """Shuffle training rows at every epoch."""
    seed: int | None = setting(1, ge=0, interpolation="${oc.select:trainer.seed,1}")
    """Seed of that shuffle, as in `trainer.seed`."""
    ignore_input_ids_mismatch: bool = setting(False)
    """Accept conversations of which the chat template rewrites turns or drops texts, and train on what it writes."""
    apply_chat_template_kwargs: dict[str, object] = setting(factory=dict)
    """Further arguments of the chat template."""
    num_workers: int = setting(8, ge=0)
    """Processes that read rows."""
    custom_cls: CustomClassConfig = subsection(CustomClassConfig)
    """A custom dataset class."""


@section
class SupervisedConfig(BaseConfig, DistributedModel):
    """Training on existing responses: data, model, optimizer, run."""

    data: SupervisedDataConfig = subsection(SupervisedDataConfig)
    """The training data."""
    model: HFModelConfig = subsection(HFModelConfig)
    """The model to train."""
    engine: FSDPEngineConfig = subsection(FSDPEngineConfig)
    """Sharding, precision, offload."""
    optim: FSDPOptimizerConfig = subsection(FSDPOptimizerConfig, lr=1e-5, lr_scheduler_type="cosine")
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = subsection(CheckpointConfig)
    """Contents of a checkpoint."""
    trainer: SFTTrainerConfig = subsection(SFTTrainerConfig)
    """Length, placement, logging, checkpoints and recovery of the run."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """Settings with which Ray is started."""
    megatron: McoreEngineConfig = subsection(McoreEngineConfig)
    """With `engine.strategy=megatron`: parallel sizes, precision, offload."""
    composed: dict[str, object] = dataclasses.field(default_factory=dict, compare=False, metadata=INTERNAL)
    """The keys as they were composed, including those that no code reads, for a data set of the user's own."""

    @property
    def placement(self) -> FSDPEngineConfig | McoreEngineConfig:
        """See :class:`DistributedModel`."""
        return self.megatron if self.engine.strategy == "megatron" else self.engine
