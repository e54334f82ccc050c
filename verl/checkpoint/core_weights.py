"""Boxes of Transformers weights from a ``torch_dist`` checkpoint of megatron-core.

megatron-core names what its own layers hold. A tensor is there in one of several forms: of one layer
(``decoder.layers.3.mlp.linear_fc2.weight``), or of all with the layers as first dimension (``decoder.layers.mlp...``);
of one expert, or of all experts of a layer; gate and up projection in one tensor or apart (``weight_w``, ``weight_v``);
norms under their own name or as part of the layer that follows (``linear_qkv.layer_norm_weight``). The vocabulary may
be padded at its end.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.checkpoint.boxes import Box
from verl.checkpoint.torch_dist import TorchDistFiles
from verl.errors import CheckpointError
from verl.utils.torch_functional import all_finite

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    "score.weight": "output_layer.weight",
    "score.bias": "output_layer.bias",
}
IN_LAYER = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
    "mlp.gate.weight": ("mlp.router.weight",),
    "mlp.gate.e_score_correction_bias": ("mlp.router.expert_bias",),
    "mlp.shared_experts.down_proj.weight": ("mlp.shared_experts.linear_fc2.weight",),
    # Multi-head latent attention.
    "self_attn.q_a_proj.weight": ("self_attention.linear_q_down_proj.weight",),
    "self_attn.q_b_proj.weight": ("self_attention.linear_q_up_proj.weight",),
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attention.linear_kv_down_proj.weight",),
    "self_attn.kv_b_proj.weight": ("self_attention.linear_kv_up_proj.weight",),
    "self_attn.q_a_layernorm.weight": (
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.q_layernorm.weight",
    ),
    "self_attn.kv_a_layernorm.weight": (
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight",
    ),
}
"""Names in megatron-core of weights that are whole tensors there."""
HALVES = re.compile(r"mlp\.(shared_experts\.|)(gate|up)_proj\.weight")
QUERIES_KEYS_VALUES = re.compile(r"self_attn\.([qkv])_proj\.(weight|bias)")
LATENT_QUERIES = "self_attention.linear_q_proj.weight"
EXPERTS = re.compile(r"mlp\.experts\.(gate_up_proj|down_proj)")


class DistFiles:
    """The weights of a checkpoint under their Transformers names, read as those of a model folder.

    Args:
        path: folder of the checkpoint.
        prefix: of all of its names; None for the only one that there is.
        config: of the text model.

    Raises:
        CheckpointError: the folder is no such checkpoint, or no name in it has the prefix.
    """

    def __init__(self, path: str, prefix: str | None, config: PretrainedConfig) -> None:
        self.folder, self.config = Path(path), config
        self._files = TorchDistFiles(self.folder)
        self._shapes = self._files.shapes
        # Queries, keys and values of a layer lie in the same rows, and are read one after the other.
        self._read = lru_cache(maxsize=2)(self._files.read)
        embedding = OUTSIDE["model.embed_tokens.weight"]
        prefixes = sorted((n.removesuffix(embedding) for n in self._shapes if n.endswith(embedding)), key=len)
        if prefix is None:  # the optimizer's states have longer ones
            prefix = prefixes[0] if prefixes else ""
        self.prefix = prefix
        if prefix + embedding not in self._shapes:
            remedy = f"set dist_checkpointing_prefix to {' or '.join(map(repr, prefixes))}"
            if not prefixes:
                first = ", ".join(sorted(self._shapes)[:3]) or "no tensors"
                remedy = f"it has {first} ... Take the checkpoint of a GPTModel of megatron-core"
            raise CheckpointError(f"'{path}' has no tensor '{prefix}{embedding}': {remedy}.")
        layers = re.compile(rf"{re.escape(prefix)}decoder\.layers\.(\d+)\.")
        numbers = {int(match[1]) for name in self._shapes if (match := layers.match(name))}
        if numbers and (count := max(numbers) + 1) != config.num_hidden_layers:
            raise CheckpointError(
                f"'{path}' has {count} layers, and config.json has {config.num_hidden_layers}. Take a "
                "checkpoint of that model."
            )
        head = prefix + OUTSIDE["lm_head.weight"]
        if config.tie_word_embeddings and head in self._shapes and self._shapes[head][0] > 1:
            raise CheckpointError(
                f"'{path}' has an output projection apart from the embedding, and config.json says that "
                "they are one (tie_word_embeddings). Take a checkpoint of that model."
            )

    def __contains__(self, name: str) -> bool:
        """Return whether a scalar head is saved; a policy's checkpoint has a vocabulary projection under this name."""
        stored = self.prefix + OUTSIDE[name]
        return stored in self._shapes and self._shapes[stored][0] == 1

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Read one box of the weight ``name``, which must have ``shape``.

        Raises:
            CheckpointError: the weight is missing, has another shape, or is not finite.
        """
        values = self._weight(name, shape, box)
        if not all_finite(values):
            raise CheckpointError(
                f"the weight {name} in '{self.folder}' is not finite (nan or infinite): the training that wrote it "
                "diverged, or a conversion overflowed. Take an earlier checkpoint."
            )
        return values

    def _weight(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        match = LAYER.fullmatch(name)
        if match is None and name in OUTSIDE:
            is_vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
            return self._cut(name, self.prefix + OUTSIDE[name], (), shape, box, is_padded=is_vocabulary)
        if match is not None:
            layer, inside = int(match[1]), match[2]
            if experts := EXPERTS.fullmatch(inside):
                return self._experts(name, layer, experts[1] == "gate_up_proj", shape, box)
            if halves := HALVES.fullmatch(inside):
                stem = f"mlp.{halves[1]}linear_fc1.weight"
                return self._half(name, self._stored(name, layer, (stem, f"{stem}_w")), halves[2] == "up", shape, box)
            if inside == "self_attn.q_proj.weight" and getattr(self.config, "kv_lora_rank", None) is not None:
                return self._cut(name, *self._stored(name, layer, (LATENT_QUERIES,)), shape, box)
            if part := QUERIES_KEYS_VALUES.fullmatch(inside):
                return self._qkv(name, layer, part[1], f"self_attention.linear_qkv.{part[2]}", shape, box)
            if inside in IN_LAYER:
                return self._cut(name, *self._stored(name, layer, IN_LAYER[inside]), shape, box)
        raise CheckpointError(
            f"the weight {name} is not read from checkpoints of megatron-core: their layers are those of Qwen2, Qwen3, "
            "Llama, Mistral, Qwen3-MoE, Mixtral, DeepSeek-V3 and GLM-4.5 without images. Set "
            "use_dist_checkpointing=false: the weights are then read from the model folder."
        )

    def _stored(
        self, weight: str, layer: int, endings: tuple[str, ...], expert: int | None = None, experts: int = 0
    ) -> tuple[str, tuple[int, ...]]:
        """Find a tensor of a layer, or of one of its ``experts``.

        Returns:
            its name, and its indices in the first dimensions: of the layer, of the expert, or none.
        """
        stem = f"{self.prefix}decoder.layers."
        layer_forms = ((f"{stem}{layer}.", (), ()), (stem, (layer,), (self.config.num_hidden_layers,)))
        expert_forms = (("", (), ()),)
        if expert is not None:
            inner = "mlp.experts.experts."
            expert_forms = ((f"{inner}{expert}.", (), ()), (inner, (expert,), (experts,)))
        for ending in endings:
            for (outer, *in_layers), (inner, *in_experts) in itertools.product(layer_forms, expert_forms):
                if (name := f"{outer}{inner}{ending}") in self._shapes:
                    (first, counts), (second, more) = in_layers, in_experts
                    self._check_counts(name, (*counts, *more))
                    return name, (*first, *second)
        raise CheckpointError(
            f"'{self.folder}' has no tensor for the weight {weight}: neither '{stem}{layer}.{expert_forms[0][0]}"
            f"{endings[0]}' nor '{stem}{expert_forms[-1][0]}{endings[0]}'. Take a checkpoint of the model in "
            "config.json."
        )

    def _check_counts(self, name: str, counts: tuple[int, ...]) -> None:
        if (has := self._shapes[name])[: len(counts)] != counts:
            raise CheckpointError(
                f"'{name}' in '{self.folder}' has the shape {list(has)}, which should begin with {list(counts)}, the "
                "numbers of layers or experts in config.json. Take a checkpoint of the model in config.json."
            )

    def _cut(
        self,
        weight: str,
        stored: str,
        first: tuple[int, ...],
        shape: tuple[int, ...],
        box: Box,
        is_padded: bool = False,
    ) -> Tensor:
        """Read a box of a tensor that has ``shape`` at the indices ``first`` of its first dimensions."""
        has = self._shapes.get(stored)
        if has is None:
            raise CheckpointError(f"'{self.folder}' has no tensor '{stored}', from which {weight} would be read.")
        inner = has[len(first) :]
        fits = inner == shape or (is_padded and inner[1:] == shape[1:] and inner[0] >= shape[0])
        if not fits:
            raise CheckpointError(
                f"'{stored}' in '{self.folder}' has the shape {list(has)}, and {weight} needs {list(shape)}"
                f"{f' at {list(first)}' if first else ''}. Take a checkpoint of the model in config.json."
            )
        start, size = box
        return self._read(stored, (*first, *start), (*(1 for _ in first), *size)).reshape(size)

    def _half(
        self, weight: str, stored: tuple[str, tuple[int, ...]], is_up: bool, shape: tuple[int, ...], box: Box
    ) -> Tensor:
        """Read a box of a gate or up projection; ``stored`` holds both, or is the name of the gate projection alone."""
        name, first = stored
        if name.endswith("_w"):
            return self._cut(weight, f"{name[:-1]}{'v' if is_up else 'w'}", first, shape, box)
        (row, *columns), size = box
        return self._cut(weight, name, first, (2 * shape[0], *shape[1:]), ((row + is_up * shape[0], *columns), size))

    def _qkv(self, weight: str, layer: int, which: str, ending: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Read rows of queries, keys or values: for each key head its queries, itself, and its value lie together."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        per_group = heads // kv_heads
        head_dim = shape[0] // (heads if which == "q" else kv_heads)
        begin, end = {"q": (0, per_group), "k": (per_group, per_group + 1), "v": (per_group + 1, per_group + 2)}[which]
        rows = (end - begin) * head_dim  # of a group
        (first, *columns), (count, *widths) = box
        group, after = first // rows, -(-(first + count) // rows)
        all_rows = (per_group + 2) * head_dim
        stored, index = self._stored(weight, layer, (ending,))
        region = (group * all_rows, *columns), ((after - group) * all_rows, *widths)
        together = self._cut(weight, stored, index, (kv_heads * all_rows, *shape[1:]), region)
        groups = together.view(after - group, per_group + 2, head_dim, *widths)[:, begin:end]
        return groups.reshape(-1, *widths)[first - group * rows :][:count]

    def _experts(self, weight: str, layer: int, is_gated: bool, shape: tuple[int, ...], box: Box) -> Tensor:
        """Read a box of the weights of all experts of a layer: (experts, rows, columns)."""
        (first, row, column), (count, rows, columns) = box
        parts = []
        for expert in range(first, first + count):
            if not is_gated:
                stored, index = self._stored(weight, layer, ("linear_fc2.weight",), expert, shape[0])
                parts.append(self._cut(weight, stored, index, shape[1:], ((row, column), (rows, columns))))
                continue
            both = self._stored(weight, layer, ("linear_fc1.weight", "linear_fc1.weight_w"), expert, shape[0])
            width, halves = shape[1] // 2, []
            for is_up in (False, True):
                begin, end = max(row - is_up * width, 0), min(row + rows - is_up * width, width)
                if begin < end:
                    inner = (begin, column), (end - begin, columns)
                    halves.append(self._half(weight, both, is_up, (width, shape[2]), inner))
            parts.append(torch.cat(halves))
        return torch.stack(parts)
