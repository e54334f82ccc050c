"""The weights of a model with LoRA adapters as a rollout engine takes them that applies adapters by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdaptedWeights:
    """A frozen base and its adapters, apart. Each call begins a collective iteration: every rank goes to the end."""

    base: Callable[[], Iterable[tuple[str, Tensor]]]
    """Weights of the model without adapters, by the names of Transformers."""
    adapters: Callable[[], Iterable[tuple[str, Tensor]]]
    """``LAYER.lora_A.weight`` (r, in) and ``LAYER.lora_B.weight`` (out, r) of each adapted layer, in the order in which
    the trainer has them."""
    scales: Mapping[str, float]
    """The scale s of each adapted layer, which computes ``x Wᵀ + ((x Aᵀ) Bᵀ) s``."""

    def scaled_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the adapters with s B in the place of B, as engines take them that know no scale."""
        for name, tensor in self.adapters():
            layer, _, part = name.rpartition(".lora_")
            yield name, tensor * self.scales[layer] if part.startswith("B") else tensor
