"""What the driver has to remember between two steps; the workers remember the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The driver after a step. Holds plain numbers, strings and tensors only, and shares nothing with the run."""

    global_step: int
    """Steps that are done."""
    dataloader: dict[str, Any]
    """Where the loader of the training rows is, with its sampler and data set if they have a state."""
    controllers: dict[str, Any]
    """What changes from step to step besides the weights (KL and entropy coefficients, epochs), by name."""
    rng: dict[str, Any]
    """The random generators of the driver's process."""
