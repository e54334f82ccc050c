"""Multi-head latent attention (MLA, arXiv:2405.04434) with the heads of this rank.

Keys and values of all heads are made of one latent vector per token, and queries too where the model has a rank for
them. Every tensor-parallel rank has the projections to latent vectors whole, and those from them for its heads.
megatron-core's own layer rotates by the index of a token in its row, and needs TransformerEngine for whole projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.plugins.megatron.layers import CausalAttention, PackedRow, RMSNorm
from verl.plugins.megatron.library import tensor_parallel


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of the attention of a model, and how it rotates and scales."""

    heads: int
    query_rank: int | None
    """Size of the latent vectors of queries; None if these are projected from hidden states."""
    kv_rank: int
    """Size of the latent vectors of keys and values."""
    rotated: int
    """Numbers of a query or a key that depend on the position; the key's are the same for all heads."""
    unrotated: int
    value: int
    """Size of a head's value."""
    is_interleaved: bool
    """True if numbers that are next to each other are rotated together; otherwise those half a vector apart."""
    scale: float
    """Factor of the scores."""
    eps: float
    """Epsilon in the norms of latent vectors."""

    @classmethod
    def from_model(cls, hf: PreTrainedModel) -> LatentShape | None:
        """Read it from a Transformers model, on any device; None if it has another attention."""
        config = hf.config.get_text_config()
        if getattr(config, "kv_lora_rank", None) is None:
            return None
        decoder: Any = hf.get_decoder()
        attention = decoder.layers[0].self_attn
        return cls(
            heads=config.num_attention_heads,
            query_rank=config.q_lora_rank,
            kv_rank=config.kv_lora_rank,
            rotated=config.qk_rope_head_dim,
            unrotated=config.qk_nope_head_dim,
            value=config.v_head_dim,
            is_interleaved=config.rope_interleave,
            scale=attention.scaling,
            eps=attention.kv_a_layernorm.variance_epsilon,
        )


class LatentAttention(nn.Module):
    """The attention of one layer; its modules have Transformers' names, except ``linear_proj`` (``o_proj``)."""

    def __init__(
        self, shape: LatentShape, config: Any, layer_number: int, pg_collection: Any, **settings: object
    ) -> None:
        super().__init__()
        self.shape, self.config = shape, config
        ranks = config.tensor_model_parallel_size
        self.heads = shape.heads // ranks
        head_layer = partial(
            tensor_parallel.ColumnParallelLinear,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=pg_collection.tp,
        )

        def full_layer(inputs: int, outputs: int) -> nn.Linear:
            linear = nn.Linear(inputs, outputs, bias=False, dtype=config.params_dtype)
            linear.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
            return linear

        query = shape.heads * (shape.unrotated + shape.rotated)
        if shape.query_rank is None:
            self.q_proj = head_layer(config.hidden_size, query)
        else:
            self.q_a_proj = full_layer(config.hidden_size, shape.query_rank)
            self.q_a_layernorm = RMSNorm(config, shape.query_rank, shape.eps)
            self.q_b_proj = head_layer(shape.query_rank, query)
        self.kv_a_proj_with_mqa = full_layer(config.hidden_size, shape.kv_rank + shape.rotated)
        self.kv_a_layernorm = RMSNorm(config, shape.kv_rank, shape.eps)
        self.kv_b_proj = head_layer(shape.kv_rank, shape.heads * (shape.unrotated + shape.value))
        self.core_attention = CausalAttention(config, layer_number, softmax_scale=shape.scale)
        self.linear_proj = tensor_parallel.RowParallelLinear(
            shape.heads * shape.value,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=pg_collection.tp,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedRow | None = None,
        **settings: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: (length, bsz, hidden), this rank's part of the length under sequence parallelism.
            attention_mask: not used.
            rotary_pos_emb: angles of all tokens (:class:`~verl.plugins.megatron.layers.Rotation`).
            packed_seq_params: of a packed row.
            settings: of any attention.

        Returns:
            The output, of the shape of ``hidden_states``, and a bias, which is None.
        """
        shape = self.shape
        if shape.query_rank is None:
            query, _ = self.q_proj(hidden_states)
        else:
            query, _ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        latent, k_rotated = self.kv_a_proj_with_mqa(hidden_states).split([shape.kv_rank, shape.rotated], dim=-1)
        key_value, _ = self.kv_b_proj(self.kv_a_layernorm(latent))
        # All ranks' heads read the same numbers, so their gradients are added up.
        if self.config.sequence_parallel:
            k_rotated = tensor_parallel.gather_from_sequence_parallel_region(k_rotated.contiguous())
        else:
            k_rotated = tensor_parallel.copy_to_tensor_model_parallel_region(k_rotated)
        # (length, bsz, heads, numbers) from here on
        query, key_value = (x.unflatten(-1, (self.heads, -1)) for x in (query, key_value))
        q_plain, q_rotated = query.split([shape.unrotated, shape.rotated], dim=-1)
        k_plain, value = key_value.split([shape.unrotated, shape.value], dim=-1)
        angles = rotary_pos_emb if rotary_pos_emb.dim() == 4 else rotary_pos_emb.unsqueeze(2)
        k_rotated = self._rotate(k_rotated.unsqueeze(2), angles).expand(-1, -1, self.heads, -1)
        query = torch.cat([q_plain, self._rotate(q_rotated, angles)], dim=-1)
        key = torch.cat([k_plain, k_rotated], dim=-1)
        is_packed = packed_seq_params is not None
        q, k, v = (x.squeeze(1) if is_packed else x for x in (query, key, value))
        attend = partial(self.core_attention, attention_mask=None, packed_seq_params=packed_seq_params)
        modules = self.config.recompute_modules if self.config.recompute_granularity == "selective" else ()
        if self.training and "core_attn" in modules:
            output = tensor_parallel.checkpoint(attend, False, q, k, v)
        else:
            output = attend(q, k, v)
        return self.linear_proj(output.unsqueeze(1) if is_packed else output)

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate pairs of numbers; ``angles`` has each angle twice."""
        half = angles[..., : angles.shape[-1] // 2]
        cos, sin = half.cos().to(x.dtype), half.sin().to(x.dtype)
        first, second = (x[..., 0::2], x[..., 1::2]) if self.shape.is_interleaved else x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
