"""Schedule of asynchronous training, derived from its settings together."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from verl.config.asynchronous import Strategy
from verl.config.ppo import PPOConfig

Mode = Literal["sync", "lag", "colocated", "separate"]


@dataclass(frozen=True, kw_only=True)
class AsyncPlan:
    """Schedule of sampling: when prompts start, with which weights, and how old their samples may become.

    The age of a sample is the number of updates of the policy between the weights that the engines had when its prompt
    started and the step that trains on it; 0 if the step trains on samples of the newest weights. No token is older.
    """

    mode: Mode
    """``sync``: a step samples its batch. ``lag``: it trains on the batch of ``lag`` steps ago. ``colocated`` and
    ``separate``: samples are drawn as they come, on the same ranks or on others."""
    lag: int
    """Steps between sampling and training in the mode ``lag``, else 0."""
    bound: int | None
    """Largest age of a sample; None if ``volume`` bounds the number of prompts instead."""
    volume: float | None
    """Between two transfers of weights at most ``1 + volume`` times as many prompts start as are trained on."""
    strategy: Strategy
    """Way to keep the bound: a step that waits in time, dropping groups that became older, or waiting at the bound."""
    sync_every: int
    """Steps (updates of the policy) between two transfers of weights."""
    batch_prompts: int
    """Prompts of a step."""
    warmup_batches: int
    """Batches that start before the first step besides its own; later each step starts one."""

    @classmethod
    def from_config(cls, config: PPOConfig) -> AsyncPlan:
        """Read ``trainer.v1`` and ``trainer.async`` of a checked configuration."""
        settings, v1 = config.trainer.async_, config.trainer.v1
        free_running = v1.trainer_mode != "sync"
        mode: Mode = "lag" if settings.lag else "sync"
        bound: int | None = settings.lag
        volume, warmup_batches, sync_every = None, settings.lag, 1
        if free_running:
            mode = "colocated" if v1.trainer_mode == "colocate_async" else "separate"
            volume = settings.volume if mode == "separate" else None
            sync_every = settings.sync_every if mode == "separate" else 1
            bound = v1.sampler.max_off_policy_threshold if volume is None else None
            warmup_batches = (v1.colocate_async if mode == "colocated" else v1.separate_async).num_warmup_batches
            if (
                bound is not None and v1.sampler.max_off_policy_strategy != "drop"
            ):  # a batch ahead of the next transfer becomes that much older
                warmup_batches = min(warmup_batches, max(0, bound + 1 - sync_every))
        return cls(
            mode=mode,
            lag=settings.lag if mode == "lag" else 0,
            bound=bound,
            volume=volume,
            strategy=v1.sampler.max_off_policy_strategy if free_running else "admit",
            sync_every=sync_every,
            batch_prompts=config.data.train_batch_size,
            warmup_batches=warmup_batches,
        )

    @property
    def is_free_running(self) -> bool:
        """True if sampling never waits for steps, so that the weights behind a sample depend on timing."""
        return self.mode in ("colocated", "separate")

    @property
    def usual_age(self) -> int:
        """Age of most samples of a step in the long run; few groups are slower."""
        if self.mode in ("sync", "lag"):
            return self.lag
        return self.prompts_ahead // self.batch_prompts + self.sync_every - 1

    @property
    def prompts_per_transfer(self) -> int:
        """Prompts that are trained on between two transfers of weights."""
        return self.sync_every * self.batch_prompts

    @property
    def prompts_ahead(self) -> int:
        """Prompts that may start before the weights whose batch they complete."""
        if self.volume is not None:
            # as typed: 0.29 * 100 is 28.999... in binary
            return int(Fraction(str(self.volume)) * self.prompts_per_transfer)
        return self.warmup_batches * self.batch_prompts
