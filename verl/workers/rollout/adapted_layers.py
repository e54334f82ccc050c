"""LoRA adapters beside the weights of a model in this process, computed as the trainer computes them.

A merged weight, W + s B A, that is rounded to 8 bits has lost most of what the adapters change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from verl.config import HFModelConfig, RolloutConfig
from verl.utils.model import torch_dtype
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.rollout.engine_kwargs import are_linear
from verl.workers.rollout.weights import ExpectedWeights


@dataclass(frozen=True)
class _Adapter:
    """The adapter of one layer."""

    down: Tensor
    """A, (r, in)."""
    up: Tensor
    """B, (out, r)."""
    scale: float

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Add the adapter's part to the layer's output, by peft's operations in their order; a forward hook."""
        return output + linear(linear(inputs[0], self.down), self.up) * self.scale


def computes_adapters(config: RolloutConfig, model_config: HFModelConfig) -> bool:
    """Return whether an engine in the worker's process computes adapters beside the weights.

    It does where merged weights would be rounded. Adapters of experts and those of DoRA are merged.
    """
    is_rounded = torch_dtype(config.dtype) is not torch.float32 or config.quantization is not None
    return model_config.has_adapters and is_rounded and are_linear(model_config)


class AdaptedLayers:
    """Adapters of the linear layers of ``module``, in ``dtype`` on ``device``; at first there are none."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._module, self._device = module, device
        self._expected = ExpectedWeights(module, dtype)
        self._tensors: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the adapters."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def load(self, weights: AdaptedWeights, version: int) -> bool:
        """Replace the adapters.

        Returns:
            whether they lie elsewhere in memory than the ones before.

        Raises:
            RolloutError: an adapter is of no layer of the model, or of another shape; the message names it.
        """
        new = self._expected.checked_adapters(weights.adapters(), version)
        if {name: tensor.shape for name, tensor in new.items()} == {
            name: tensor.shape for name, tensor in self._tensors.items()
        }:
            for name, tensor in new.items():
                self._tensors[name].copy_(tensor)
            return False
        self.drop()
        self._tensors = {name: tensor.to(self._device) for name, tensor in new.items()}
        for layer, scale in weights.scales.items():
            down, up = (self._tensors[f"{layer}.lora_{part}.weight"] for part in "AB")
            hook = self._module.get_submodule(layer).register_forward_hook(_Adapter(down, up, scale))
            self._hooks.append(hook)
        return True

    def drop(self) -> bool:
        """Remove all adapters; return whether there were any."""
        had_some = bool(self._hooks)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._tensors = [], {}
        return had_some
