"""The layers of a model that are ours and not megatron-core's: norm, attention, and a head that returns hidden states.

Its own norm cannot divide sequences over ranks without TransformerEngine, and its own attention makes a matrix of
(tokens x tokens) and cannot take packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from verl.workers.engine.megatron.library import GPTModel, PackedSeqParams, parallel_state, tensor_parallel
from verl.workers.packed_attention import AttentionRule, Packing, attend, attend_packed


@dataclass
class PackedRow(PackedSeqParams):
    """The sequences of a packed row, for megatron-core's rotary embedding and for :class:`CausalAttention`."""

    packing: Packing | None = None

    @classmethod
    def of(cls, packing: Packing) -> PackedRow:
        """Describe a row on the device of ``packing``."""
        sums, longest = packing.cu_seqlens, packing.longest
        return cls(
            qkv_format="thd",
            cu_seqlens_q=sums,
            cu_seqlens_kv=sums,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            packing=packing,
        )


class DecoderModel(GPTModel):
    """megatron-core's decoder, whose copies of a tied embedding on two pipeline stages are both read from files."""

    def _is_in_embd_group(self) -> bool:
        """Return False, so that the stages do not exchange weights before these are read."""
        return False


def freeze_row(embedding: Any, token: int) -> None:
    """Let no gradient reach the embedding of ``token``, as Transformers does for the padding token.

    Its embedding is often zero, whose norm has a gradient of about 1/√ε; a policy can draw it as any other token.
    """

    def hook(layer: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        keep = arguments[0] != token  # (bsz, length)
        if layer.reduce_scatter_embeddings:  # then the output is (length / ranks, bsz, hidden)
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            keep = keep.t().chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        output.register_hook(lambda gradient: gradient * keep.unsqueeze(-1))

    embedding.register_forward_hook(hook)


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · w, computed in fp32 as Transformers does (arXiv:1910.07467)."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **settings: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # megatron-core then adds up the gradients of ranks that each saw a part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class CausalAttention(nn.Module):
    """Causal attention over packed rows or over rows that are padded at their ends, with the heads of this rank."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **settings: Any) -> None:
        super().__init__()
        self.rule = AttentionRule(softmax_scale or config.kv_channels**-0.5)

    def set_window(self, window: int | None) -> None:
        """Let each token attend to so many tokens, itself included; None is all before it."""
        self.rule = replace(self.rule, window=window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRow | None = None,
        **settings: Any,
    ) -> Tensor:
        """Attend; ``query`` is (tokens, heads, head_dim) if packed, (length, bsz, heads, head_dim) if padded.

        Returns:
            (tokens, heads · head_dim), or (length, bsz, heads · head_dim).
        """
        if packed_seq_params is not None and packed_seq_params.packing is not None:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # (1, heads, tokens, head_dim)
            packing = packed_seq_params.packing
            rule = self.rule
            if rule.window is not None and rule.window >= packing.longest:
                rule = replace(rule, window=None)
            return attend_packed(q, k, v, packing, rule).squeeze(0).flatten(1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # (bsz, heads, length, head_dim)
        return attend(q, k, v, self.rule).permute(2, 0, 1, 3).flatten(2)


class HiddenHead(nn.Module):
    """The last layer of a model, in the place of megatron-core's: it returns hidden states.

    Logits and scalars are computed at chosen tokens only, from its weights.

    Args:
        weight: (vocabulary / ranks, hidden), this rank's rows; (1, hidden) of a value or reward model; None if the
            embedding on this rank is used.
        bias: (1,) of a value or reward model, or None.
        sequence_parallel: hidden states arrive divided over the tensor-parallel ranks.
    """

    def __init__(self, weight: nn.Parameter | None, bias: nn.Parameter | None, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **settings: Any) -> tuple[Tensor, None]:
        """Return the hidden states of all tokens; their gradients must be the same on all tensor-parallel ranks."""
        if self.sequence_parallel:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            return gather(hidden, tensor_parallel_output_grad=False), None
        return hidden, None
