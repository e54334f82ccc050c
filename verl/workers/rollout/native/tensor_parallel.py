"""Tensor parallelism of the native engine: the ranks that share one model, and which part of each weight a rank holds.

Heads of attention, columns of MLPs and the vocabulary are split; norms are whole on every rank. A layer's partial sums
are added over the ranks. Each rank computes the logits of its part of the vocabulary, and all ranks gather them, so all
hold the same bits.

The ranks run the same passes in the same order. What only the first rank knows, such as requests that come while others
run, it shares with the others once per token.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from verl.utils.model_facts.model_files import head_split_problem
from verl.workers.rollout.ranks import EXCHANGE_S, engine_group

T = TypeVar("T")

# Styles of Transformers' plans whose tensors are whole on every rank.
_WHOLE = {"replicated_with_grad_allreduce"}


class EngineRanks:
    """The consecutive ranks that share one engine, and what they exchange. Constructor and calls are collective.

    With one rank nothing is exchanged, and each method returns what it was given.

    Args:
        size: number of ranks of an engine.
        device: where the engine computes.

    Raises:
        ConfigError: ``size`` does not divide the number of ranks.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        rank, self.leads = engine_group(size, f"rollout.tensor_model_parallel_size={size}")
        self.size, self.rank_in_engine = size, rank % size
        self._first = rank - self.rank_in_engine
        self._control: dist.ProcessGroup | None = None
        self._compute: dist.ProcessGroup | None = None
        if size > 1:
            # The first rank may wait long for requests, and the others for it. Hangs are detected elsewhere.
            timeout = datetime.timedelta(seconds=EXCHANGE_S)
            self._control = _own_group(size, timeout=timeout, backend="gloo")
            self._compute = self._control if device.type == "cpu" else _own_group(size)

    def share(self, value: T) -> T:
        """Return the value of the first rank; it must be picklable."""
        if self._control is None:
            return value
        values: list[object] = [value]
        dist.broadcast_object_list(values, self._first, self._control)
        return cast(T, values[0])

    def smallest(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        if self._control is None:
            return value
        minimum = torch.tensor([value])
        dist.all_reduce(minimum, dist.ReduceOp.MIN, self._control)
        return int(minimum)

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first rank; the others give one of the same shape and format."""
        if self._compute is not None:
            dist.broadcast(tensor, self._first, self._compute)
        return tensor

    def added(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks, in place."""
        if self._compute is not None:
            dist.all_reduce(tensor, group=self._compute)
        return tensor

    def joined(self, part: Tensor, count: int) -> Tensor:
        """Join the ranks' parts of the last dimension, which has ``count`` elements in all, cut by :meth:`bounds`."""
        if self._compute is None:
            return part
        widest = -(-count // self.size)
        part = nn.functional.pad(part, (0, widest - part.shape[-1])).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self._compute)
        lengths = [self.bounds(count, rank)[1] for rank in range(self.size)]
        return torch.cat(
            [padded_part[..., :length] for padded_part, length in zip(parts, lengths, strict=True)], dim=-1
        )

    def bounds(self, count: int, rank_in_engine: int | None = None) -> tuple[int, int]:
        """Return start and length of a rank's part of ``count`` elements; by default of this rank's part."""
        rank_in_engine = self.rank_in_engine if rank_in_engine is None else rank_in_engine
        start, end = (rank * count // self.size for rank in (rank_in_engine, rank_in_engine + 1))
        return start, end - start


def _own_group(size: int, **settings: object) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups(size, **settings)
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclass(frozen=True)
class Part:
    """The part of a weight that a rank holds."""

    shape: torch.Size
    """Shape of the whole weight."""
    dim: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole weight, as a view."""
        return tensor.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class OnFirst:
    """A bias that is added to partial sums: the first rank's, and zero on the others."""

    shape: torch.Size
    """Shape of the weight."""
    is_first: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return what this rank adds."""
        return tensor if self.is_first else torch.zeros_like(tensor)


Split = Part | OnFirst


def kv_heads_per_rank(config: PretrainedConfig, size: int) -> int:
    """Return the number of key/value heads of a rank; with fewer heads than ranks, ranks repeat them."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return max(1, heads // size)


def split_problem(module: PreTrainedModel, size: int) -> str | None:
    """Why a model cannot be split over ``size`` ranks, as words that follow "it"; None if it can."""
    text = module.config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    said = f"cannot be split over rollout.tensor_model_parallel_size={size} ranks"
    if text is not module.config:
        return f"{said}: this engine splits models of text alone"
    if reason := head_split_problem(heads, kv_heads, size):
        return f"{said}: {reason}"
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        return f"{said}: Transformers has no plan of its layers"
    if other := sorted(set(plan.values()) - {"colwise", "rowwise"} - _WHOLE):
        return f"{said}: its layers are split by {', '.join(other)}, and this engine splits by columns and rows alone"
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    known = {heads * head_dim, kv_heads * head_dim}
    for name, layer in module.base_model.named_modules():
        style = _style(plan, name)
        if style and not isinstance(layer, nn.Linear):
            return f"{said}: {name} is no linear layer"
        if style == "colwise" and _is_of_attention(module, name) and cast(nn.Linear, layer).out_features not in known:
            return f"{said}: {name} has other widths than {' and '.join(map(str, sorted(known)))}"
    return None


def split_model(module: PreTrainedModel, ranks: EngineRanks) -> dict[nn.Parameter, Split]:
    """Give a model without weights the shapes of this rank's part, and make its layers exchange their results.

    Args:
        module: its parameters are on the meta device; :func:`split_problem` has none.
        ranks: the ranks of the engine.

    Returns:
        The split of each new parameter that is not whole.
    """
    splits: dict[nn.Parameter, Split] = {}
    if ranks.size == 1:
        return splits
    text = module.config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    query = tuple(n * head_dim for n in ranks.bounds(heads))
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    kv_count = kv_heads_per_rank(module.config, ranks.size)
    key = ranks.rank_in_engine * kv_heads // ranks.size * head_dim, kv_count * head_dim
    base: Any = module.base_model
    plan = text.base_model_tp_plan or {}
    for name, layer in list(base.named_modules()):
        if hasattr(layer, "num_key_value_groups"):  # of the attention that Transformers computes, for the check
            layer.num_key_value_groups = heads // ranks.size // kv_count
        style, in_attention = _style(plan, name), _is_of_attention(module, name)
        if style == "colwise":
            width = layer.out_features
            bounds = ranks.bounds(width) if not in_attention else query if width == heads * head_dim else key
            _split_rows(layer, bounds, splits)
            layer.out_features = bounds[1]
        elif style == "rowwise":
            start, length = query if in_attention else ranks.bounds(layer.in_features)
            splits[layer.weight] = Part(layer.weight.shape, 1, start, length)
            if layer.bias is not None:
                splits[layer.bias] = OnFirst(layer.bias.shape, ranks.rank_in_engine == 0)
            layer.in_features = length
            layer.register_forward_hook(lambda _, __, output: ranks.added(output))
    _split_vocabulary(module, ranks, splits)
    return _with_own_shapes(module, splits)


def _style(plan: Mapping[str, str], name: str) -> str | None:
    """Return how a plan of Transformers splits the layer ``name``; None if it is whole."""
    style = plan.get(re.sub(r"\.\d+(?=\.)", ".*", name))
    return None if style in _WHOLE else style


def _is_of_attention(module: PreTrainedModel, name: str) -> bool:
    parent = module.base_model.get_submodule(name.rpartition(".")[0])
    return type(parent).__name__.endswith("Attention")


def _split_rows(layer: Any, bounds: tuple[int, ...], splits: dict[nn.Parameter, Split]) -> None:
    for weight in (layer.weight, getattr(layer, "bias", None)):
        if weight is not None:
            splits[weight] = Part(weight.shape, 0, *bounds)


def _split_vocabulary(module: PreTrainedModel, ranks: EngineRanks, splits: dict[nn.Parameter, Split]) -> None:
    """Split embeddings and the last layer by token; a weight that both hold is split once."""
    embedding: Any = module.get_input_embeddings()
    head: Any = module.get_output_embeddings()
    size = embedding.num_embeddings
    start, length = ranks.bounds(size)
    _split_rows(embedding, (start, length), splits)
    look_up, embedding.padding_idx = embedding.forward, None  # that row need not be here

    def forward(ids: Tensor) -> Tensor:
        places = ids - start
        is_here = (places >= 0) & (places < length)
        rows = look_up(places.clamp(0, length - 1))
        return ranks.added(rows.masked_fill(~is_here[..., None], 0))

    embedding.forward = forward
    vocab = head.out_features
    bounds = ranks.bounds(vocab)
    _split_rows(head, bounds, splits)
    head.out_features = bounds[1]
    head.register_forward_hook(lambda _, __, output: ranks.joined(output, vocab))


def _with_own_shapes(module: nn.Module, splits: dict[nn.Parameter, Split]) -> dict[nn.Parameter, Split]:
    """Replace each split parameter by one of this rank's shape; return the splits of the new ones."""
    made = {
        weight: nn.Parameter(torch.empty_like(split.of(weight)), requires_grad=False)
        for weight, split in splits.items()
    }
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if weight in made:
                part.register_parameter(name, made[weight])
    return {made[weight]: split for weight, split in splits.items()}
