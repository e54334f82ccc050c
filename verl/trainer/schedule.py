"""When a run saves and validates."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.trainer.config.trainer import BaseTrainerConfig
    from verl.workers.config import FSDPOptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Answers ``due("save", step)``: every ``frequency`` steps, and at the last step.

    A frequency that is not positive turns its event off, at the last step too.
    """

    total_steps: int
    frequencies: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: BaseTrainerConfig, total_steps: int) -> Schedule:
        """The schedule that ``trainer.save_freq`` and ``trainer.test_freq`` describe."""
        return cls(total_steps, {"save": trainer.save_freq, "test": trainer.test_freq})

    def due(self, event: str, step: int) -> bool:
        """Whether ``event`` happens after ``step`` (counted from 1)."""
        frequency = self.frequencies[event]
        return frequency > 0 and (step % frequency == 0 or step == self.total_steps)


def with_total_steps(optimizer: FSDPOptimizerConfig, total_steps: int) -> FSDPOptimizerConfig:
    """The optimizer's settings with the run's length filled in, which its learning-rate schedule ends at.

    A length that the user set (``optim.total_training_steps``) stays.
    """
    if optimizer.total_training_steps > 0:
        return optimizer
    return replace(optimizer, total_training_steps=total_steps)
