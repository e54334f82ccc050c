"""LoRA adapters in the form in which SGLang applies them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.nn import functional

from verl.errors import ConfigError

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ATTENTION = (*_FUSED[0], "o_proj")
"""Endings of the names of layers whose adapters SGLang applies in a mixture of experts."""
LAYERS = (*ATTENTION, *_FUSED[1], "down_proj")
"""Endings of the names of layers whose adapters SGLang applies in other models."""


def check_layers(names: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise ConfigError if a layer's name, or ending of a name, does not end in one of those allowed."""
    if unsupported := sorted({last for name in names if (last := name.rsplit(".", 1)[-1]) not in allowed}):
        raise ConfigError(
            f"rollout.merge_adapters=false: of this model sglang applies adapters of {', '.join(allowed)} by itself, "
            f"and those of {', '.join(unsupported)} only merged. Set rollout.merge_adapters=true."
        )


def completed(
    adapters: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], allowed: Sequence[str]
) -> dict[str, Tensor]:
    """Add adapters of 0 where SGLang wants some, and rows and columns of 0 to those of small rank.

    SGLang computes q, k and v as one layer, and gate and up as another. Of the layers in one it wants adapters of all
    or of none, and all adapters of a model must have one rank.

    Args:
        adapters: see :class:`~verl.workers.adapted_weights.AdaptedWeights`.
        shapes: (out, in) of the weights of all layers by their names.
        allowed: last parts of the names of the layers whose adapters SGLang is given.

    Raises:
        ConfigError: SGLang is given no adapters of such a layer.
    """
    layers = {name.split(".lora_")[0]: name for name in adapters}
    check_layers(layers, allowed)
    rank = max(tensor.shape[0] for name, tensor in adapters.items() if ".lora_A." in name)
    completed_adapters: dict[str, Tensor] = {}
    for layer, some in layers.items():
        parent, last = layer.rsplit(".", 1)
        for other in next((group for group in _FUSED if last in group), (last,)):
            side, weight = f"{parent}.{other}", shapes[f"{parent}.{other}.weight"]
            for part, shape in (("A", (rank, weight[1])), ("B", (weight[0], rank))):
                name = f"{side}.lora_{part}.weight"
                adapter = adapters.get(name, adapters[some].new_zeros(shape))
                missing = [size - has for size, has in zip(shape, adapter.shape, strict=True)]
                completed_adapters[name] = functional.pad(adapter, (0, missing[1], 0, missing[0]))
    return completed_adapters
