"""Optimizer and learning-rate schedule."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from verl.base_config import BaseConfig, section, setting


@section
class OptimizerConfig(BaseConfig):
    """What every optimizer has: step size, decay, clipping and a schedule with warm-up."""

    lr: float = setting(1e-6, ge=0)
    """Peak learning rate."""
    lr_warmup_steps_ratio: float = setting(0.0, ge=0, le=1)
    """Warm-up as a fraction of all optimizer steps; used when `lr_warmup_steps` is not positive."""
    total_training_steps: int = setting(-1, ge=-1)
    """Length of the schedule in optimizer steps; -1 takes the length of the run."""
    weight_decay: float = setting(0.01, ge=0)
    """Decoupled weight decay."""
    lr_warmup_steps: int = setting(-1, ge=-1)
    """Warm-up in optimizer steps; 0 or -1 leaves it to `lr_warmup_steps_ratio`."""
    betas: tuple[float, float] = setting((0.9, 0.999))
    """Decay of the running mean and of the running square of the gradient."""
    clip_grad: float = setting(1.0, gt=0)
    """Largest norm of the gradient of one step; the same setting as `grad_clip` of the actor and the critic."""


@section
class FSDPOptimizerConfig(OptimizerConfig):
    """Optimizer of a model that is trained under FSDP."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPOptimizerConfig"

    optimizer: str = setting("AdamW")
    """Class name of the optimizer inside `optimizer_impl`."""
    optimizer_impl: str = setting("torch.optim")
    """Module that holds the optimizer class, as an import path."""
    min_lr_ratio: float = setting(0.0, ge=0, le=1)
    """Where a decaying schedule ends, as a fraction of `lr`."""
    num_cycles: float = setting(0.5, gt=0)
    """Cosine periods over the run; 0.5 is one fall from the peak to the end."""
    lr_scheduler_type: Literal["constant", "cosine"] = setting("constant")
    """Shape of the schedule after the warm-up."""
    warmup_style: Literal["constant", "cosine"] | None = setting(None)
    """Older name of `lr_scheduler_type`; wins over its default."""
    override_optimizer_config: dict[str, Any] | None = setting(None)
    """Further keyword arguments of the optimizer class."""
