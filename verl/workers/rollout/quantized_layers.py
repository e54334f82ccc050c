"""Weights of linear layers in 8 bits, with a scale per output channel, for engines that get them from the trainer.

Of a weight W, (outputs, inputs), or (experts, outputs, inputs) for experts that are stacked, s = max |W| / L over the
inputs of each output, and the engine has q = W / s rounded to the nearest number of the format (ties to even). L is the
format's largest number: 127 of ``int8``, 448 of ``fp8`` (e4m3). Where that s is 0, it is 1.

Embeddings, norms, biases, the output head, routers and other gates, and the vision tower keep their format. Each pass
of a layer makes s q in the engine's format, computes as ever, and frees it: numbers are those of quantized weights, and
memory is saved, but no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.backends.replaced_layers import replace_forwards
from verl.workers.routers import routers_of

SCALE = "_scale"
"""A quantized parameter's scales have its name and this ending."""
_GATES = {"gate", "router", "shared_expert_gate"}
"""Names of linear layers that decide which experts, or how much of them, a token gets."""


@dataclass(frozen=True)
class WeightFormat:
    """A number format of 8 bits, and how weights are rounded to it."""

    dtype: torch.dtype
    largest: float
    """L, the largest number that is used."""

    def quantize(self, weight: Tensor, inputs: int = -1) -> tuple[Tensor, Tensor]:
        """Return q, and s in fp32, whose dimension ``inputs`` has size 1."""
        scale = torch.linalg.vector_norm(weight, torch.inf, inputs, keepdim=True).float() / self.largest
        scale = torch.where(scale == 0, 1.0, scale)
        ratio = weight / scale
        return (ratio if self.dtype.is_floating_point else ratio.round_()).to(self.dtype), scale


FORMATS = {"int8": WeightFormat(torch.int8, 127.0), "fp8": WeightFormat(torch.float8_e4m3fn, 448.0)}
"""Format for each value of ``rollout.quantization``."""


@dataclass(frozen=True)
class QuantizedWeight:
    """Quantization of one parameter."""

    format: WeightFormat
    inputs: int
    """Dimension of the inputs, -1 or -2."""

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and s of the weight; see :meth:`WeightFormat.quantize`."""
        return self.format.quantize(weight, self.inputs)


class _QuantizedLayer(nn.Module):
    """A layer whose quantized weights exist in full only while it computes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names, dtype = self._verl_quantized
        held = {name: self._parameters[name] for name in names}
        for name in names:
            full = getattr(self, name).float().mul_(getattr(self, name + SCALE)).to(dtype)
            self._parameters[name] = full  # pyright: ignore[reportArgumentType]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(held)

    _verl_quantized: tuple[tuple[str, ...], torch.dtype]
    """Names of the parameters that are quantized, and the format of the engine."""


def quantize_layers(
    model: PreTrainedModel, format: WeightFormat, dtype: torch.dtype
) -> dict[nn.Parameter, QuantizedWeight]:
    """Make the layers of ``model`` compute with weights of 8 bits, in place.

    Args:
        model: its parameters are on the meta device.
        format: of the weights.
        dtype: format in which the layers compute.

    Returns:
        How each parameter is to be quantized that a layer then expects quantized, with its scales, in fp32, as a
        parameter of the same name and :data:`SCALE`. None are if the model has no linear layer of a kind known here.
    """
    weights: dict[nn.Parameter, QuantizedWeight] = {}
    for _, layer, names, inputs in _layers(model):
        layer._verl_quantized = names, dtype  # pyright: ignore[reportArgumentType]
        weights |= {layer.get_parameter(name): QuantizedWeight(format, inputs) for name in names}
    replace_forwards(model, lambda module: _QuantizedLayer if "_verl_quantized" in vars(module) else None)
    return weights


def rounded_weights(
    weights: Iterable[tuple[str, Tensor]], model: PreTrainedModel, format: WeightFormat
) -> Iterator[tuple[str, Tensor]]:
    """Round weights of a dense ``model`` for an engine which takes q, and s beside it.

    Yields:
        For the weight of each layer that :func:`quantize_layers` would quantize q, and s under the same name and
        :data:`SCALE`; other weights as they are.
    """
    rounded = {f"{layer}.{name}" for layer, _, names, _ in _layers(model) for name in names}
    for name, tensor in weights:
        if name in rounded:
            values, scale = format.quantize(tensor)
            yield name, values
            yield name + SCALE, scale
        else:
            yield name, tensor


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, tuple[str, ...], int]]:
    """Yield each layer with quantized weights: its name, itself, their names, and the dimension of their inputs."""
    decoder = model.get_decoder()
    decoder_modules, routers = set(decoder.modules()), set(routers_of(model))
    for name, module in model.named_modules():
        if module not in decoder_modules or module in routers or name.rpartition(".")[2] in _GATES:
            continue
        if isinstance(module, nn.Linear):
            yield name, module, ("weight",), -1
        elif type(module).__name__.endswith("Experts"):
            stacked = tuple(name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3)
            if stacked:
                yield name, module, stacked, -2 if getattr(module, "is_transposed", False) else -1
