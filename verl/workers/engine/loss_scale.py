"""Loss scaling for training in fp16, whose smallest positive number is 6e-8: without it small gradients become 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

FIRST_SCALE = 2**16
"""Factor of a new run."""
GROWTH_INTERVAL = 2000
"""Updates without overflow after which the factor doubles; as ``FIRST_SCALE`` that of ``torch.amp.GradScaler``."""
MAX_SCALE = 2**24
"""Largest factor; it does not double beyond."""


@dataclass
class LossScale:
    """The factor of a loss before its backward pass (arXiv:1710.03740), by which gradients are divided again.

    It is a power of two, so that neither rounds. After gradients that are not finite it halves, and the mini-batch is
    computed again: unlike with ``torch.amp.GradScaler``, which skips the update, no sample is lost.
    """

    value: int = FIRST_SCALE
    updates: int = 0
    """Updates since the factor changed."""

    def __str__(self) -> str:
        return str(self.value)

    @property
    def can_fall(self) -> bool:
        """True if a smaller factor is left: at 1, non-finite gradients are an error of the data or model."""
        return self.value > 1

    def overflowed(self) -> None:
        """Halve the factor, if it is above 1."""
        self.value, self.updates = max(1, self.value // 2), 0

    def updated(self) -> None:
        """Count an update, and double the factor after every ``GROWTH_INTERVAL``."""
        self.updates += 1
        if self.updates == GROWTH_INTERVAL:
            self.value, self.updates = min(2 * self.value, MAX_SCALE), 0

    def numbers(self) -> dict[str, int]:
        """Return what a checkpoint has of it."""
        return {"loss_scale": self.value, "loss_scale_updates": self.updates}

    @classmethod
    def from_checkpoint(cls, numbers: Mapping[str, int]) -> Self:
        """Restore it from a checkpoint; one of a run in another format has none, and the factor starts anew."""
        return cls(int(numbers.get("loss_scale", FIRST_SCALE)), int(numbers.get("loss_scale_updates", 0)))
