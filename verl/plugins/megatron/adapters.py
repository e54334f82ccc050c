"""LoRA adapters beside the parallel layers of megatron-core, divided as these layers are.

They are the adapters of Transformers' layers (:mod:`verl.workers.engine.model.adapters`): queries, keys and values have
one each, though megatron-core computes them by one matrix, ``linear_qkv``, and so have the gate and the up projection
in ``linear_fc1``. Of a column-parallel layer each rank has the whole of A and its rows of B, of a row-parallel layer
its columns of A and the whole of B. What the ranks exchange has the width r.

All experts of a layer have their adapters in two matrices of peft, which are kept here with three dimensions: A
(experts, r, in) and B (out, r, experts). Both are reshaped to peft's without a change of their order in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as product

from verl.config import HFModelConfig
from verl.errors import ConfigError
from verl.plugins.megatron.library import tensor_parallel
from verl.plugins.megatron.weights import ShardRegion
from verl.workers.engine.model.adapters import (
    LORA_A,
    LORA_B,
    AdapterTarget,
    first_factor,
    is_adapter,
    own_name,
    saved_adapters,
)


class LayerAdapter(nn.Module):
    """Parts on this rank of A (r, in) and B (out, r) of one layer of Transformers, or of one expert.

    Args:
        layer: the parallel layer of megatron-core that computes it.
        rank: r.
        rows: of B on this rank.
        scale: s.
    """

    def __init__(self, layer: Any, rank: int, rows: int, scale: float) -> None:
        super().__init__()
        weight, is_column = layer.weight, isinstance(layer, tensor_parallel.ColumnParallelLinear)
        self.lora_A = nn.Parameter(weight.new_zeros(rank, weight.shape[1]))
        self.lora_B = nn.Parameter(weight.new_zeros(rows, rank))
        self.scale = scale
        for part, is_whole in ((self.lora_A, is_column), (self.lora_B, not is_column)):
            settings: Any = part  # attributes that megatron-core reads when it adds up gradients
            settings.allreduce = weight.allreduce
            # The part that all ranks have is applied to the tokens of one rank.
            settings.sequence_parallel = is_whole and layer.sequence_parallel and not layer.is_expert


class ParallelAdapters(nn.Module):
    """Adapters of the layers of Transformers that one parallel layer of megatron-core computes: s (x Aᵀ) Bᵀ.

    Args:
        layer: of megatron-core.
        widths: rows of each layer of Transformers in the weight of ``layer`` on this rank, in their order.
        groups: how often this order is repeated; for each key head its queries, itself and its value lie together.
    """

    def __init__(self, layer: Any, widths: Mapping[str, int], groups: int) -> None:
        super().__init__()
        self.widths = dict(widths)
        self.groups = groups
        self.parts = nn.ModuleDict()
        self.is_enabled = True
        self._is_column = isinstance(layer, tensor_parallel.ColumnParallelLinear)
        self._is_expert, self._group = layer.is_expert, layer.tp_group
        self._exchange = _exchange_of(layer, self._is_column)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the term that is added to the layer's output, from the layer's input ``x``."""
        parts: dict[str, Any] = dict(self.parts.items())
        ranks = [len(part.lora_A) for part in parts.values()]
        inner = self._exchange(product(x, self._shared(torch.cat([part.lora_A for part in parts.values()]), True)))
        slices = dict(zip(parts, inner.split(ranks, dim=-1), strict=True))
        outputs = [
            product(slices[name], self._shared(parts[name].lora_B, False)) * parts[name].scale
            if name in parts
            else inner.new_zeros(*inner.shape[:-1], width)
            for name, width in self.widths.items()
        ]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([output.unflatten(-1, (self.groups, -1)) for output in outputs], dim=-1).flatten(-2)

    def _shared(self, part: Tensor, is_down: bool) -> Tensor:
        """Add up the gradients of the part that all ranks of a divided expert have.

        These ranks get all tokens of the expert, and the exchange of tokens adds up their outputs.
        """
        if not self._is_expert or is_down != self._is_column:
            return part
        return tensor_parallel.copy_to_tensor_model_parallel_region(part, group=self._group)

    def hook(self, layer: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> Any:
        """Add the adapters to the output of ``layer``; a forward hook."""
        if not self.is_enabled:
            return outputs
        output, bias = outputs
        return output + self(inputs[0]), bias


def _exchange_of(layer: Any, is_column: bool) -> Callable[[Tensor], Tensor]:
    """Return what the ranks of ``layer`` do with x Aᵀ: gather all tokens, add up their terms, or nothing."""
    if layer.is_expert:
        return _nothing
    if is_column:
        if layer.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region
        return tensor_parallel.copy_to_tensor_model_parallel_region  # adds up gradients
    if layer.sequence_parallel:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region
    return tensor_parallel.reduce_from_tensor_model_parallel_region


def _nothing(x: Tensor) -> Tensor:
    return x


# ---- add ------------------------------------------------------------------------------------------


def shape_by_expert(name: str, shape: tuple[int, ...], experts: int | None) -> tuple[int, ...]:
    """Return the shape that a trained parameter of peft has here: that of experts' adapters in three dimensions."""
    if not experts or ".experts." not in name or not is_adapter(name):
        return shape
    if name.endswith(LORA_A):
        return experts, shape[0] // experts, shape[1]
    return shape[0], shape[1] // experts, experts


def add_adapters(
    pieces: nn.ModuleList,
    base: Iterable[ShardRegion],
    targets: Mapping[str, AdapterTarget],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[ShardRegion]:
    """Add adapters to this rank's layers, all of them 0, and return where their weights are.

    Args:
        pieces: the model.
        base: regions of its weights.
        targets: what each layer of Transformers with an adapter adapts, by its name in a model of peft.
        shapes: of A and B, by their names in a model of peft; those of experts have three dimensions.
    """
    if other := [name for name in shapes if is_adapter(name) and not name.endswith((LORA_A, LORA_B))]:
        raise ConfigError(f"{other[0]}: strategy=megatron has no DoRA. Set model.lora.use_dora=false, or use fsdp2.")
    by_weight: dict[str, list[ShardRegion]] = {}
    by_parameter: dict[str, list[ShardRegion]] = {}
    for region in base:
        by_weight.setdefault(own_name(region.name), []).append(region)
        by_parameter.setdefault(region.parameter, []).append(region)
    regions: list[ShardRegion] = []
    for name, target in targets.items():
        down, up = f"{name}{LORA_A}", f"{name}{LORA_B}"
        rank = shapes[down][-2]
        for parameter in {region.parameter: None for region in by_weight.get(target.weight, ())}:
            module = parameter.removesuffix(".weight")
            layer: Any = pieces.get_submodule(module)
            if not isinstance(layer, (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)):
                raise ConfigError(
                    f"{target.weight} gets an adapter, and its layer is not divided over ranks under "
                    f"strategy=megatron, which has adapters of divided layers alone. Add {_part(target.weight)} to "
                    "exclude_modules, or use strategy=fsdp2."
                )
            boxes = [region for region in by_weight[target.weight] if region.parameter == parameter]
            part, rows = _part(target.weight), sum(region.size[-2] for region in boxes)
            if not hasattr(layer, "adapters"):
                layer.adapters = _adapters_of(layer, by_parameter[parameter])
                layer.register_forward_hook(layer.adapters.hook)
            layer.adapters.parts[part] = LayerAdapter(layer, rank, rows, target.scale)
            prefix = f"{module}.adapters.parts.{part}"
            regions += _regions(down, up, f"{prefix}.lora_A", f"{prefix}.lora_B", boxes, shapes)
    return regions


def _part(weight: str) -> str:
    """Return the name of a layer of Transformers inside that of megatron-core."""
    return weight.removesuffix(".weight").rsplit(".", 1)[-1]


def _adapters_of(layer: Any, regions: list[ShardRegion]) -> ParallelAdapters:
    """Make the adapters of a layer with the weights of ``regions``, still without any."""
    rows = torch.arange(len(layer.weight))
    views = [(region.view(rows), _part(own_name(region.name))) for region in regions]
    views.sort(key=lambda pair: int(pair[0].min()))
    groups = max(len(view) if view.dim() > 1 else 1 for view, _ in views)
    widths: dict[str, int] = {}
    for view, part in views:
        widths[part] = widths.get(part, 0) + view.numel()
    return ParallelAdapters(layer, widths, groups)


def _regions(
    down: str, up: str, lora_a: str, lora_b: str, boxes: list[ShardRegion], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[ShardRegion]:
    """Yield the regions of A and B for the weight in ``boxes``, of one layer or of one expert."""
    rank, first = shapes[down][-2], boxes[0]
    expert = first.start[:-2]  # of a weight of several experts
    columns, full = first.size[-1], shapes[down][-1]
    yield ShardRegion(
        down,
        lora_a,
        (*expert, 0, first.start[-1]),
        (*(1 for _ in expert), rank, columns),
        _identity,
        is_divided=columns < full,
    )
    for region, view in zip(boxes, _rows_of(boxes), strict=True):
        size = (region.size[-2], rank, *(1 for _ in expert))
        is_divided = sum(box.size[-2] for box in boxes) < shapes[up][0]
        yield ShardRegion(up, lora_b, (region.start[-2], 0, *expert), size, view, is_divided=is_divided)


def as_in_peft(name: str, tensor: Tensor) -> Tensor:
    """Return a weight in the shape that it has in a model of peft."""
    if tensor.dim() < 3 or not is_adapter(name):
        return tensor
    return tensor.flatten(0, 1) if name.endswith(LORA_A) else tensor.flatten(1)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _rows_of(boxes: list[ShardRegion]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Views of the rows of B that stand beside each box, one box after the other."""
    start = 0
    for box in boxes:
        rows = slice(start, start + box.size[-2])
        yield lambda tensor, rows=rows: tensor[rows]
        start += box.size[-2]


def first_values(config: HFModelConfig, seed: int, trained: Mapping[str, Tensor]) -> Callable[[str], Tensor | None]:
    """Return a function that gives each trained parameter its first values by its name in peft, None for 0.

    Without trained adapters A is drawn (:func:`~verl.workers.engine.model.adapters.first_factor`), and B is 0.

    Args:
        config: rank and variant, or the folder of trained adapters.
        seed: of the random numbers.
        trained: the parameters on the meta device, by name.
    """
    if config.lora_adapter_path:
        saved = saved_adapters(Path(config.lora_adapter_path), trained)
        return saved.get

    def draw(name: str) -> Tensor | None:
        return first_factor(name, tuple(trained[name].shape), seed) if name.endswith(LORA_A) else None

    return draw


# ---- use ------------------------------------------------------------------------------------------


@contextmanager
def without_adapters(pieces: nn.ModuleList) -> Iterator[None]:
    """Compute with the base weights inside the context."""
    adapters = [module for module in pieces.modules() if isinstance(module, ParallelAdapters)]
    for adapter in adapters:
        adapter.is_enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_enabled = True


def need_gradients(embedding: nn.Module) -> None:
    """Make gradients pass through the output of ``embedding``, whose own weights are frozen.

    Layers that are computed again, and stages without adapters, take gradients only where their input has them.
    """

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_(True)

    embedding.register_forward_hook(hook)
