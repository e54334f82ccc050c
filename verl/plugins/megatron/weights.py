"""Map of each Transformers weight into the parameters of megatron-core, as boxes that each rank holds.

A weight ``W`` of Transformers is on several ranks a box of it each: some rows (column-parallel layers, the vocabulary),
some columns (row-parallel layers), or all of it (norms). Queries, keys and values share one parameter, as do the gate
and the up projection. All conversions are made from this one table: reading model folders, exporting, checkpoints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl.config.megatron import HYBRIDS
from verl.errors import ConfigError
from verl.vision.families import TOWER

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Index of the first element in each dimension, and the sizes."""


@dataclass(frozen=True)
class ShardRegion:
    """A box of a Transformers weight inside a parameter of this rank."""

    name: str
    """Name of the weight in Transformers."""
    parameter: str
    """Name of the parameter in megatron-core."""
    start: tuple[int, ...]
    """Index of the box's first element in each dimension of the weight."""
    size: tuple[int, ...]
    """Shape of the box."""
    view: Callable[[Tensor], Tensor]
    """The box as a view of the parameter, or of another tensor of its shape; the view may have more dimensions."""
    is_divided: bool
    """True if tensor-parallel ranks have different boxes; otherwise each has the full weight."""

    @property
    def box(self) -> Box:
        """Start and size."""
        return self.start, self.size

    def read(self, tensor: Tensor) -> Tensor:
        """Return the box in ``tensor``, which has the shape of the parameter; possibly a view."""
        return self.view(tensor).reshape(self.size)

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Copy ``values``, which have the shape of the box, into ``tensor``."""
        view = self.view(tensor)
        view.copy_(values.reshape(view.shape))


# Names of weights in Transformers: of the experts of a layer, and of a module in a layer.
_LAYERS = r"model\.(?:language_model\.)?layers\.(\d+)"
_EXPERTS = re.compile(rf"{_LAYERS}\.mlp\.experts\.(gate_up_proj|down_proj)")
_LAYER = re.compile(rf"{_LAYERS}\.(.+)\.(weight|bias|e_score_correction_bias|A_log|dt_bias)")
_TOWER = f"model.{TOWER}."
# Module of a layer in Transformers → module of megatron-core whose weight is, or contains, the weight of the first.
_INSIDE = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn.q_proj": "self_attention.linear_qkv",
    "self_attn.k_proj": "self_attention.linear_qkv",
    "self_attn.v_proj": "self_attention.linear_qkv",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.gate_proj": "mlp.linear_fc1",
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate": "mlp.router",
    "mlp.shared_experts.gate_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.up_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
}
_INSIDE |= {
    f"mlp.shared_expert.{name}": _INSIDE[f"mlp.shared_experts.{name}"] for name in ("gate_proj", "up_proj", "down_proj")
}
_DELTA_NET_PROJECTIONS = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_INSIDE |= {"linear_attn": "self_attention"} | {
    f"linear_attn.{name}": f"self_attention.{name}" for name in (*_DELTA_NET_PROJECTIONS, "conv1d", "norm", "out_proj")
}
_SHARED_GATE = "mlp.shared_expert_gate"
_LATENT = {
    f"self_attn.{name}": f"self_attention.{name}"
    for name in (
        "q_proj",
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
    )
}
"""Modules of multi-head latent attention (:mod:`verl.plugins.megatron.latent`), besides ``o_proj``."""
_IN_HEADS = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "final_layernorm",
}
"""Modules of a head of multi-token prediction (:mod:`verl.plugins.megatron.prediction`) beside its layer."""
FP32_WEIGHTS = ("e_score_correction_bias",)
"""Last parts of the names of weights that are fp32 in a model of every format."""


@dataclass(frozen=True)
class ExpertDivision:
    """The experts that this rank has, and its part of each."""

    ranks: int
    """Ranks that share the experts of a layer."""
    rank: int
    tensor_ranks: int
    """Ranks that share each expert."""
    tensor_rank: int

    def regions(self, name: str, parameters: str, shape: tuple[int, ...]) -> Iterator[ShardRegion]:
        """Iterate over this rank's boxes of ``name``.

        Args:
            name: of the weight of all experts of a layer: (experts, 2 · width, hidden) of the gate and up projections,
                (experts, hidden, width) of the down projection.
            parameters: in megatron-core, to which the number of an expert is added.
            shape: of the weight.
        """
        count = shape[0] // self.ranks
        for local in range(count):
            expert, parameter = self.rank * count + local, f"{parameters}.{local}"
            if name.endswith("down_proj"):
                width = shape[2] // self.tensor_ranks
                start, size = (expert, 0, self.tensor_rank * width), (1, shape[1], width)
                yield ShardRegion(name, f"{parameter}.linear_fc2.weight", start, size, _identity, is_divided=True)
                continue
            width = shape[1] // 2 // self.tensor_ranks
            for half, view in enumerate((_first_half, _second_half)):
                start = (expert, half * shape[1] // 2 + self.tensor_rank * width, 0)
                size = (1, width, shape[2])
                yield ShardRegion(name, f"{parameter}.linear_fc1.weight", start, size, view, is_divided=True)


@dataclass(frozen=True)
class Division:
    """Division of matrices by this rank's tensor-parallel group."""

    ranks: int
    rank: int
    query_heads: int
    """Number of the full model's query heads."""
    kv_heads: int
    head_dim: int
    experts: ExpertDivision
    has_latents: bool
    """True if attention is multi-head latent attention."""
    has_gates: bool
    """True if each query head has a gate for its output; in the projection the gate's rows follow the query's."""
    mixed: tuple[int, int, int]
    """Rows of all heads' queries, keys and values in the convolutions of gated delta nets."""

    @classmethod
    def from_config(cls, config: PretrainedConfig, group: dist.ProcessGroup, experts: ExpertDivision) -> Division:
        """Read the heads from the Transformers config of a text model."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        has_latents = getattr(config, "kv_lora_rank", None) is not None
        is_hybrid, mixed = config.model_type in HYBRIDS, (0, 0, 0)
        if is_hybrid:
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            mixed = keys, keys, config.linear_num_value_heads * config.linear_value_head_dim
        return cls(ranks, rank, heads, config.num_key_value_heads, head_dim, experts, has_latents, is_hybrid, mixed)

    def regions(self, name: str, parameter: str, shape: tuple[int, ...]) -> Iterator[ShardRegion]:
        """Iterate over this rank's boxes of the weight ``name``."""
        if name.rsplit(".", 2)[-2] in ("conv1d", "in_proj_qkv"):
            # The rank's queries, keys and values follow each other in the parameter too.
            first = end = 0
            for section_rows in self.mixed:
                rows = section_rows // self.ranks
                start, end = end, end + rows
                box = (first + self.rank * rows, *(0 for _ in shape[1:])), (rows, *shape[1:])
                yield ShardRegion(name, parameter, *box, lambda tensor, a=start, b=end: tensor[a:b], is_divided=True)
                first += section_rows
        else:
            yield self._region(name, parameter, shape)

    def _region(self, name: str, parameter: str, shape: tuple[int, ...]) -> ShardRegion:
        if name.startswith(_TOWER):
            return ShardRegion(name, parameter, (0,) * len(shape), shape, _identity, is_divided=False)
        stem = name.rsplit(".", 2)[-2]
        if stem in ("q_b_proj", "kv_b_proj") or (self.has_latents and stem == "q_proj"):
            return self._rows(name, parameter, shape, _identity)
        if stem in _DELTA_NET_PROJECTIONS or name.endswith((".A_log", ".dt_bias")):
            return self._rows(name, parameter, shape, _identity)
        if stem in ("q_proj", "k_proj", "v_proj"):
            return self._qkv(name, parameter, shape, "qkv".index(stem[0]))
        if stem in ("gate_proj", "up_proj"):
            return self._rows(name, parameter, shape, _first_half if stem == "gate_proj" else _second_half)
        if stem == "eh_proj":
            return self._rows(name, parameter, shape, _identity)
        if stem in ("embed_tokens", "lm_head"):
            return self._vocabulary(name, parameter, shape)
        if stem in ("o_proj", "out_proj", "down_proj"):
            width = shape[1] // self.ranks
            start, size = (0, self.rank * width), (shape[0], width)
            return ShardRegion(name, parameter, start, size, _identity, is_divided=True)
        return ShardRegion(name, parameter, (0,) * len(shape), shape, _identity, is_divided=False)

    def _rows(self, name: str, parameter: str, shape: tuple[int, ...], view: Callable[[Tensor], Tensor]) -> ShardRegion:
        count = shape[0] // self.ranks
        start = (self.rank * count, *(0 for _ in shape[1:]))
        return ShardRegion(name, parameter, start, (count, *shape[1:]), view, is_divided=True)

    def _vocabulary(self, name: str, parameter: str, shape: tuple[int, ...]) -> ShardRegion:
        """Rows of a vocabulary that is padded at its end to a multiple of the ranks."""
        rank_rows = -(-shape[0] // self.ranks)
        first = min(self.rank * rank_rows, shape[0])
        count = min(rank_rows, shape[0] - first)
        return ShardRegion(
            name, parameter, (first, 0), (count, shape[1]), lambda tensor: tensor[:count], is_divided=True
        )

    def _qkv(self, name: str, parameter: str, shape: tuple[int, ...], which: int) -> ShardRegion:
        """Rows of queries, keys or values: for each key head its queries, itself, and its value lie together."""
        groups, per_group = self.kv_heads // self.ranks, self.query_heads // self.kv_heads
        queries = per_group * (2 if self.has_gates else 1)
        first, last = ((0, queries), (queries, queries + 1), (queries + 1, queries + 2))[which]

        def view(tensor: Tensor) -> Tensor:
            heads = tensor.view(groups, queries + 2, self.head_dim, *tensor.shape[1:])[:, first:last]
            # Here all queries of a group come before their gates.
            return heads.unflatten(1, (2, per_group)).transpose(1, 2) if self.has_gates and which == 0 else heads

        return self._rows(name, parameter, shape, view)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _first_half(tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[0]


def _second_half(tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[1]


def regions_of(
    shapes: Mapping[str, tuple[int, ...]], pieces: nn.ModuleList, division: Division, is_tied: bool
) -> list[ShardRegion]:
    """Find the Transformers weights in ``pieces``, this rank's part of the model.

    Args:
        shapes: of all weights of the model, by their Transformers name, tied ones once.
        pieces: ``GPTModel`` of megatron-core each.
        division: of its matrices.
        is_tied: whether the output projection is the embedding; the last pipeline stage then has a copy, as it has for
            heads of multi-token prediction.

    Raises:
        ConfigError: a weight has no region, or a parameter of ``pieces`` is no weight of the model.
    """
    local = {name for name, _ in pieces.named_parameters()}
    layers = {
        layer.layer_number - 1: f"{piece_index}.decoder.layers.{index}"
        for piece_index, piece in enumerate(pieces)
        for index, layer in enumerate(piece.decoder.layers)  # type: ignore[union-attr]
    }
    last_piece, heads = pieces[-1], f"{len(pieces) - 1}.heads"
    if last_piece.heads is not None:
        layers |= {
            head.transformer_layer.layer_number - 1: f"{heads}.layers.{index}.transformer_layer"
            for index, head in enumerate(last_piece.heads.layers)  # type: ignore[union-attr]
        }
    last = f"{len(pieces) - 1}.output_layer"
    outside = {"lm_head": last, "score": last}
    for model in ("model", "model.language_model"):
        outside[f"{model}.embed_tokens"] = "0.embedding.word_embeddings"
        outside[f"{model}.norm"] = f"{len(pieces) - 1}.decoder.final_layernorm"
    weights: list[ShardRegion] = []
    for name, shape in shapes.items():
        if match := _EXPERTS.fullmatch(name):
            if (layer := layers.get(int(match[1]))) is not None:
                weights += division.experts.regions(name, f"{layer}.mlp.experts.local_experts", shape)
            continue
        targets = [_parameter_of(name, layers, outside, _INSIDE | _LATENT if division.has_latents else _INSIDE)]
        if name.endswith(".embed_tokens.weight"):
            targets += [*([f"{last}.weight"] if is_tied else []), f"{heads}.embedding.word_embeddings.weight"]
        weights += [region for target in targets if target in local for region in division.regions(name, target, shape)]
    if unfilled := sorted(local - {weight.parameter for weight in weights}):
        raise ConfigError(f"the model has no weight for megatron-core's {', '.join(unfilled[:3])}.")
    return weights


def _parameter_of(
    name: str, layers: Mapping[int, str], outside: Mapping[str, str], in_layers: Mapping[str, str]
) -> str | None:
    """The name in megatron-core; None if the weight belongs to a layer on another pipeline stage.

    ``layers`` are the names of this rank's layers by their number, ``outside`` those of modules that are not in layers,
    and ``in_layers`` those of modules inside of them.
    """
    if name.startswith(_TOWER):
        return f"0.{name.removeprefix('model.')}"
    if match := _LAYER.fullmatch(name):
        layer_index, inside, kind = match.groups()
        if inside == _SHARED_GATE:
            layer = layers.get(int(layer_index))
            return None if layer is None else f"{layer}.mlp.shared_experts.gate_weight"
        if inside in in_layers:
            layer = layers.get(int(layer_index))
            return None if layer is None else f"{layer}.{in_layers[inside]}.{kind}"
        if inside in _IN_HEADS:
            layer = layers.get(int(layer_index))
            return None if layer is None else f"{layer.removesuffix('.transformer_layer')}.{_IN_HEADS[inside]}.{kind}"
    stem, _, kind = name.rpartition(".")
    if stem in outside:
        return f"{outside[stem]}.{kind}"
    raise ConfigError(
        f"the weight '{name}' is not supported by strategy=megatron, which has the layers of Qwen2, Qwen3, Llama, "
        "Mistral, Qwen3-MoE, Mixtral, DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen's models with images. Use "
        "strategy=fsdp2 for this model."
    )


BUCKET_BYTES = 2**29
"""Bytes of the whole weights that are gathered at once: each rank sends one message for all its boxes of them."""


class WeightGatherer:
    """Gathers boxes of all ranks to whole weights, a bucket of weights at a time. Collective to create.

    Args:
        shapes: of all weights, by their Transformers name, in the order in which they are gathered.
        regions: the boxes of this rank.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], regions: list[ShardRegion]) -> None:
        self.shapes = shapes
        ranks: list[list[tuple[str, Box]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, [(weight.name, weight.box) for weight in regions])
        self._boxes: dict[str, dict[Box, int]] = {name: {} for name in shapes}
        for rank, boxes in enumerate(ranks):
            for name, box in boxes:
                self._boxes[name].setdefault(box, rank)  # the lowest rank that has a box sends it
        self._mine = {(weight.name, weight.box): weight for weight in reversed(regions)}

    def owned(self) -> list[ShardRegion]:
        """The boxes that this rank holds in the name of all that have the same: together all ranks' once."""
        me = dist.get_rank()
        return [weight for (name, box), weight in self._mine.items() if self._boxes[name][box] == me]

    def gather(
        self,
        boxes: Callable[[ShardRegion], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        without: Set[str] = frozenset(),
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over whole tensors by name. Collective: every rank iterates to the end.

        ``boxes`` returns the box of a region that this rank owns. Weights in ``without`` are skipped.
        """
        bucket: dict[str, torch.dtype] = {}
        nbytes = 0
        for name, shape in self.shapes.items():
            if name in without:
                continue
            weight_dtype = torch.float32 if name.rpartition(".")[2] in FP32_WEIGHTS else dtype
            size = math.prod(shape) * weight_dtype.itemsize
            if bucket and nbytes + size > BUCKET_BYTES:
                yield from self._filled(bucket, boxes, device).items()
                bucket, nbytes = {}, 0
            bucket[name] = weight_dtype
            nbytes += size
        yield from self._filled(bucket, boxes, device).items()

    def _filled(
        self, bucket: Mapping[str, torch.dtype], boxes: Callable[[ShardRegion], Tensor], device: torch.device
    ) -> dict[str, Tensor]:
        """Return whole tensors of the boxes of all ranks, each of which sends its own of one format at once."""
        tensors = {name: torch.empty(self.shapes[name], dtype=dtype, device=device) for name, dtype in bucket.items()}
        sent: dict[tuple[int, torch.dtype], list[tuple[str, Box, Tensor]]] = {}
        for name, full in tensors.items():
            for (start, size), rank in self._boxes[name].items():
                part = full[tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))]
                sent.setdefault((rank, full.dtype), []).append((name, (start, size), part))
        for (rank, _), parts in sent.items():
            is_own = rank == dist.get_rank()
            for name, box, part in parts if is_own else ():
                part.copy_(boxes(self._mine[name, box]))
            sizes = [part.numel() for _, _, part in parts]
            if dist.get_world_size() > 1 and sum(sizes):
                packet = torch.cat([part.reshape(-1) for _, _, part in parts])
                dist.broadcast(packet, src=rank)
                for (_, _, part), values in zip(parts, packet.split(sizes), strict=True) if not is_own else ():
                    part.copy_(values.view(part.shape))
        return tensors
