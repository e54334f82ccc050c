"""Configuration of asynchronous training: modes, bounds on the age of samples, transfers of weights."""

from __future__ import annotations

from typing import Literal

from verl.config.base import BaseConfig, section, setting, subsection

TrainerMode = Literal["sync", "colocate_async", "separate_async"]
Strategy = Literal["admit", "drop", "wait"]


@section
class AsyncConfig(BaseConfig):
    """Training on responses that were sampled some steps ago."""

    lag: int = setting(0, ge=0)
    """Steps between sampling and training: step s trains on responses of the weights before step s - lag."""
    volume: float | None = setting(None, ge=0)
    """With `trainer.v1.trainer_mode=separate_async`, bound the number of prompts in place of their age: between two
    transfers of weights at most 1 + volume times as many start as are trained on; null bounds the age."""
    sync_every: int = setting(1, ge=1)
    """With `trainer.v1.trainer_mode=separate_async`, steps between two transfers of weights to the rollout engines."""
    partial_rollout: bool = setting(True)
    """In the two modes of `trainer.v1`, interrupt responses under way when weights change, and continue them with the
    new weights; false, which would finish them first, is not in this version."""
    keep_kv_cache: bool = setting(False)
    """Keep keys and values of an interrupted response, which are those of earlier weights, instead of computing them
    again with the new weights."""
    record_dir: str | None = setting(None, path=True)
    """In the two modes of `trainer.v1`, folder for what each step trains on: its samples in their order, with tokens,
    log-probs and versions of weights, a safetensors file for each step; those of later steps are removed. null records
    nothing."""
    replay: str | None = setting(None, path=True)
    """Folder that `record_dir` of an earlier run has filled. The run trains on these samples instead of drawing any,
    and so computes the same weights, also on one process; null draws samples."""


@section
class ColocateAsyncConfig(BaseConfig):
    """Settings of `trainer_mode=colocate_async`."""

    num_warmup_batches: int = setting(1, ge=0)
    """Batches that start before the first step besides its own, so that sampling is that much ahead of training."""


@section
class SeparateAsyncConfig(BaseConfig):
    """Settings of `trainer_mode=separate_async`."""

    num_warmup_batches: int = setting(1, ge=0)
    """Batches that start before the first step besides its own, so that sampling is that much ahead of training."""
    parameter_sync_step: int = setting(4, ge=1)
    """Mini-batches of one step: `data.train_batch_size` must be this times `actor.ppo_mini_batch_size`."""


@section
class OffPolicySamplerConfig(BaseConfig):
    """Selection of the samples that a step trains on, in the two asynchronous modes."""

    max_off_policy_threshold: int = setting(8, ge=0)
    """Largest age of a sample: updates of the policy after the weights that the engines had when its prompt started.
    Waiting for a place at the engines counts, so its tokens may be younger."""
    max_off_policy_strategy: Strategy = setting("admit")
    """`admit` lets a step wait for slow groups early enough that none ever becomes older, and nothing is lost; `drop`
    discards groups that became older and starts others; `wait` waits for a group once it has that age."""


@section
class V1Config(BaseConfig):
    """Modes in which sampling and training overlap."""

    trainer_mode: TrainerMode = setting("sync")
    """`sync` samples a batch and trains on it; `colocate_async` carries unfinished responses over into the next step,
    on the same ranks; `separate_async` samples on other ranks without end."""
    colocate_async: ColocateAsyncConfig = subsection(ColocateAsyncConfig)
    """Settings of `trainer_mode=colocate_async`."""
    separate_async: SeparateAsyncConfig = subsection(SeparateAsyncConfig)
    """Settings of `trainer_mode=separate_async`."""
    sampler: OffPolicySamplerConfig = subsection(OffPolicySamplerConfig)
    """Selection of the samples that a step trains on, in the two asynchronous modes."""
