"""Optimizer and learning-rate schedule from their configuration."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.errors import ConfigError
from verl.utils.registry import suggest
from verl.workers.config import FSDPOptimizerConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: FSDPOptimizerConfig) -> Optimizer:
    """The class ``optimizer`` of the module ``optimizer_impl``; AdamW in its fused form unless told otherwise.

    Raises:
        ConfigError: there is no such class, or it does not take a setting.
    """
    try:
        module = importlib.import_module(config.optimizer_impl)
    except ImportError as error:
        raise ConfigError(f"optim.optimizer_impl={config.optimizer_impl} cannot be imported: {error}.") from error
    cls = getattr(module, config.optimizer, None)
    if not isinstance(cls, type):
        known = [name for name, value in vars(module).items() if isinstance(value, type) and name != "Optimizer"]
        hint = suggest(config.optimizer, known)
        raise ConfigError(f"optim.optimizer={config.optimizer}: {config.optimizer_impl} has no such class.{hint}")
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    if "betas" in cls.__init__.__code__.co_varnames:
        settings["betas"] = tuple(config.betas)
    settings |= config.override_optimizer_config or {}
    if cls is AdamW and not settings.keys() & {"fused", "foreach"}:
        settings["fused"] = True
    try:
        return cls(parameters, **settings)
    except TypeError as error:
        raise ConfigError(
            f"optim.override_optimizer_config: {config.optimizer} refuses its settings: {error}."
        ) from error


def lr_factor(step: int, config: FSDPOptimizerConfig) -> float:
    """The learning rate of optimizer schedule step ``step`` (from 0), as a fraction of ``lr``.

    Warm-up over w steps is linear: the first step has 1/(w+1), step w the peak. After it ``constant`` stays,
    and ``cosine`` falls over the rest of ``total_training_steps`` to ``min_lr_ratio``:

        r + (1 - r) · (1 + cos(2π · num_cycles · progress)) / 2
    """
    total = config.total_training_steps
    warmup = config.lr_warmup_steps if config.lr_warmup_steps > 0 else int(config.lr_warmup_steps_ratio * max(total, 0))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if (config.warmup_style or config.lr_scheduler_type) == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    fall = (1 + math.cos(2 * math.pi * config.num_cycles * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * fall


def build_scheduler(optimizer: Optimizer, config: FSDPOptimizerConfig) -> LambdaLR:
    """The schedule of ``lr_factor``.

    Raises:
        ConfigError: the schedule depends on a length that is not known.
    """
    needs_length = (config.warmup_style or config.lr_scheduler_type) != "constant" or (
        config.lr_warmup_steps <= 0 and config.lr_warmup_steps_ratio > 0
    )
    if needs_length and config.total_training_steps <= 0:
        raise ConfigError(
            "this learning-rate schedule needs its length: set optim.total_training_steps (the trainer fills it in "
            "from the length of the run)."
        )
    return LambdaLR(optimizer, lambda step: lr_factor(step, config))
