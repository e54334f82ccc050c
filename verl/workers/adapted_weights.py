"""The weights of a model with LoRA adapters as a rollout engine takes them that applies adapters by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdaptedWeights:
    """A frozen base and its adapters, apart. Each call begins a collective iteration: every rank goes to the end."""

    base: Callable[[], Iterable[tuple[str, Tensor]]]
    """Weights of the model without adapters, by the names of Transformers."""
    adapters: Callable[[], Iterable[tuple[str, Tensor]]]
    """``LAYER.lora_A.weight`` (r, in) and ``LAYER.lora_B.weight`` (out, r) of each adapted layer. The scale is part of
    the second: the layer computes ``x Wᵀ + (x Aᵀ) Bᵀ``."""
