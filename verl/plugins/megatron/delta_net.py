"""Gated delta nets (arXiv:2412.06464) with the heads of this rank: the recurrent layers of Qwen3-Next and Qwen3.5.

Each head keeps a matrix S of (key numbers x value numbers). With decay α and writing strength β, at each token

    S ← α S + β k (v - α Sᵀ k)ᵀ        output = Sᵀ q

Queries, keys and values have passed a short causal convolution before. Every sequence begins with S = 0 and nothing
before its first token in the convolution: packed rows are laid out one sequence a row for both. megatron-core's own
layer takes no packed rows, and cannot be made without the package ``fla``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from verl.plugins.megatron.layers import PackedRow
from verl.plugins.megatron.library import tensor_parallel
from verl.utils.transformers_private import gated_delta_rule


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Sizes of the gated delta nets of a model."""

    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``: value heads that are next to each other share a key head."""
    key_dim: int
    """Numbers of a head's key."""
    value_dim: int
    kernel: int
    """Tokens that the convolution sees."""
    eps: float
    """Epsilon in the norm of a head's output."""
    is_grouped: bool
    """True if one projection has query, key, values and gates of a key head beside each other, and another one its
    strengths and decays, as in Qwen3-Next; otherwise queries, keys and values follow each other in one projection, and
    gates, strengths and decays have one each, as in Qwen3.5."""

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> DeltaShape:
        """Read them from the Transformers config of a decoder."""
        return cls(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            kernel=config.linear_conv_kernel_dim,
            eps=config.rms_norm_eps,
            is_grouped=config.model_type == "qwen3_next",
        )


class GatedDeltaNet(nn.Module):
    """The layer; its parameters have Transformers' names."""

    def __init__(
        self, shape: DeltaShape, config: Any, layer_number: int, pg_collection: Any, **settings: object
    ) -> None:
        super().__init__()
        self.shape, self.config = shape, config
        ranks = config.tensor_model_parallel_size
        self.key_heads, self.value_heads = shape.key_heads // ranks, shape.value_heads // ranks
        queries, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim

        def head_layer(outputs: int) -> Any:
            return tensor_parallel.ColumnParallelLinear(
                config.hidden_size,
                outputs,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=pg_collection.tp,
            )

        if shape.is_grouped:
            self.in_proj_qkvz = head_layer(2 * queries + 2 * values)
            self.in_proj_ba = head_layer(2 * shape.value_heads)
        else:
            self.in_proj_qkv = head_layer(2 * queries + values)
            self.in_proj_z = head_layer(values)
            self.in_proj_b = head_layer(shape.value_heads)
            self.in_proj_a = head_layer(shape.value_heads)
        channels = (2 * queries + values) // ranks
        dtype = config.params_dtype
        self.conv1d = nn.Conv1d(channels, channels, shape.kernel, groups=channels, bias=False, dtype=dtype)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=dtype))
        self.norm = GatedNorm(shape.value_dim, shape.eps, dtype)
        self.out_proj = tensor_parallel.RowParallelLinear(
            values,
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
        packed_seq_params: PackedRow | None = None,
        **settings: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer.

        Args:
            hidden_states: (length, bsz, hidden), this rank's part of the length under sequence parallelism.
            attention_mask: not used; rows are padded at their ends.
            packed_seq_params: of a packed row.
            settings: of any attention.

        Returns:
            The output, of the shape of ``hidden_states``, and a bias, which is None.
        """
        qkv, z, b, a = self._projected(hidden_states)
        lengths = None
        if packed_seq_params is not None and packed_seq_params.packing is not None:
            lengths = packed_seq_params.packing.lengths
        # (rows, length, numbers) from here on, one sequence a row
        mixed, strength, decay = (_rows(x, lengths) for x in (qkv, b, a))
        mixed = functional.conv1d(
            mixed.transpose(1, 2), self.conv1d.weight, padding=self.shape.kernel - 1, groups=mixed.shape[-1]
        )[..., : mixed.shape[1]]
        keys, values = self.key_heads * self.shape.key_dim, self.value_heads * self.shape.value_dim
        query, key, value = functional.silu(mixed).transpose(1, 2).split([keys, keys, values], dim=-1)
        query, key = (x.unflatten(-1, (self.key_heads, -1)) for x in (query, key))
        shared_by = self.value_heads // self.key_heads
        output = gated_delta_rule(
            query.repeat_interleave(shared_by, dim=2),
            key.repeat_interleave(shared_by, dim=2),
            value.unflatten(-1, (self.value_heads, -1)),
            -self.A_log.float().exp() * functional.softplus(decay.float() + self.dt_bias),
            strength.sigmoid(),
        )
        output = _row(output, lengths)  # (length, bsz, heads, numbers)
        return self.out_proj(self.norm(output, z.unflatten(-1, (self.value_heads, -1))).flatten(2))

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank beside each other, gates, strengths and decays.

        All are (length, bsz, numbers), of all tokens.
        """
        if not self.shape.is_grouped:
            qkv, z, b, a = (
                layer(hidden)[0] for layer in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
            )
            return qkv, z, b, a
        shared_by = self.value_heads // self.key_heads
        widths = [self.shape.key_dim] * 2 + [shared_by * self.shape.value_dim] * 2
        by_head = self.in_proj_qkvz(hidden)[0].unflatten(-1, (self.key_heads, -1)).split(widths, dim=-1)
        query, key, value, z = (x.flatten(-2) for x in by_head)
        by_head = self.in_proj_ba(hidden)[0].unflatten(-1, (self.key_heads, -1)).split([shared_by] * 2, dim=-1)
        b, a = (x.flatten(-2) for x in by_head)
        return torch.cat([query, key, value], dim=-1), z, b, a


class GatedNorm(nn.Module):
    """x / √(mean x² + ε) · w · silu(gate) of each head's output; all heads have one w."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise the last dimension; computed in fp32 as Transformers does."""
        # Each tensor-parallel rank has other heads, so the gradients of all are added up.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.weight)
        wide = x.float()
        normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return (normed * functional.silu(gate.float())).to(x.dtype)


def _rows(x: Tensor, lengths: tuple[int, ...] | None) -> Tensor:
    """Lay out (length, bsz, ...) as (rows, length, ...), a packed row as one row a sequence with zeros at the ends."""
    if lengths is None:
        return x.transpose(0, 1)
    return pad_sequence(list(x.squeeze(1).split(lengths)), batch_first=True)


def _row(x: Tensor, lengths: tuple[int, ...] | None) -> Tensor:
    """Undo :func:`_rows`."""
    if lengths is None:
        return x.transpose(0, 1)
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)]).unsqueeze(1)
