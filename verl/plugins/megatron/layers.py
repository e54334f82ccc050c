"""The layers of a model that are ours and not megatron-core's: norm, attention, and a head that returns hidden states.

Its own norm cannot divide sequences over ranks without TransformerEngine, and its own attention makes a matrix of
(tokens x tokens) and cannot take packed rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from verl.plugins.megatron.library import GPTModel, PackedSeqParams, parallel_state, tensor_parallel
from verl.plugins.megatron.vision import placed_features
from verl.utils.ulysses import gather_heads_scatter_seq, heads_for_sequence
from verl.vision.model import ImageInputs
from verl.workers.packed_attention import AttentionRule, Packing, attend, attend_packed


@dataclass
class PackedRow(PackedSeqParams):
    """The sequences of a packed row, for :class:`CausalAttention`."""

    packing: Packing | None = None

    @classmethod
    def from_packing(cls, packing: Packing) -> PackedRow:
        """Describe a row on the device of ``packing``."""
        # Without bounds megatron-core rotates the row as a whole, by the angles of :class:`Rotation`.
        return cls(qkv_format="thd", packing=packing)


class Rotation(nn.Module):
    """Rotary embedding (arXiv:2104.09864) by given positions of tokens; it replaces megatron-core's.

    megatron-core's takes the index of a token in its row as its position, and divides rows in another way over ranks
    that share them.

    Args:
        frequencies: (head_dim / 2,) in radians per position.
        axes: (head_dim / 2,) which axis of the positions of a model with images each frequency follows: 0 for time, 1
            for height, 2 for width; None for a model of text.
    """

    frequencies: Tensor
    axes: Tensor | None

    def __init__(self, frequencies: Tensor, axes: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", axes, persistent=False)
        self.positions: tuple[Tensor, bool] | None = None

    def get_rotary_seq_len(self, *settings: object) -> int:
        """Return 0: the length is that of the positions."""
        return 0

    def forward(self, length: int, **settings: object) -> Tensor:
        """Return the angles, (tokens, 1, head_dim) of a packed row, (length, bsz, 1, head_dim) of padded rows."""
        assert self.positions is not None
        positions, is_packed = self.positions
        if positions.dim() == 3 and self.axes is not None:
            # Of the axes of verl.vision.positions the first is the number of the token.
            by_frequency = positions[1:].permute(2, 1, 0)[..., self.axes]
        else:
            by_frequency = positions.t()[..., None]
        angles = by_frequency.float() * self.frequencies  # (length, bsz, head_dim / 2)
        angles = torch.cat([angles, angles], dim=-1)
        return angles if is_packed else angles.unsqueeze(2)


class DecoderModel(GPTModel):
    """megatron-core's decoder, whose copies of a tied embedding on two pipeline stages are both read from files.

    With a vision tower it has images in place of their tokens.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.visual: nn.Module | None = None
        """Transformers' vision tower, on the first piece of a model with images."""
        self.heads: nn.Module | None = None
        """Heads of multi-token prediction, on the last piece."""
        self.ahead: list[Tensor] = []
        """Hidden states of each head in the last pass with ``tokens_ahead``, (bsz, length, hidden)."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packing: Packing | None,
        padding: Tensor,
        images: ImageInputs | None = None,
        tokens_ahead: Sequence[Tensor] = (),
    ) -> Tensor:
        """Compute hidden states of all tokens, (bsz, length, hidden); other stages return what the next one takes.

        Args:
            input_ids: (bsz, length), this rank's part if several share sequences.
            position_ids: same shape; (4, bsz, length) for a model with images (:mod:`verl.vision.positions`).
            packing: of a packed row, None for rows that are padded at their ends.
            padding: (bsz, length), True on padding, which routers of experts do not count.
            images: of the pass; only the first piece of the model reads them.
            tokens_ahead: what each head reads (``ids`` of :mod:`verl.plugins.megatron.prediction`); without it
                they do not run.
        """
        self._tokens_ahead = tokens_ahead
        self.rotary_pos_emb.positions = position_ids, packing is not None
        packed = None if packing is None else PackedRow.from_packing(packing)
        embeddings, layer_inputs = None, {}
        if self.visual is not None and images is not None:
            embeddings = self.embedding(input_ids, position_ids)  # (length / ranks, bsz, hidden)
            places, (features, *rest) = placed_features(self.visual, images, self.config.sequence_parallel)
            embeddings = embeddings.index_put(places, features.to(embeddings.dtype))
            if rest:
                layer_inputs = {"context": torch.stack(rest).to(embeddings.dtype), "context_mask": torch.stack(places)}
        # Where megatron-core computes the embeddings, it divides the padding with them.
        if self.config.sequence_parallel and (embeddings is not None or not self.pre_process):
            parts = padding.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim=1)
            padding = parts[parallel_state.get_tensor_model_parallel_rank()]
        return super().forward(
            input_ids,
            position_ids,
            None,
            decoder_input=embeddings,
            packed_seq_params=packed,
            padding_mask=padding,
            extra_block_kwargs=layer_inputs,
        )

    def _postprocess(
        self, hidden_states: Tensor, rotary_pos_emb: Tensor, packed_seq_params: PackedRow | None, **settings: object
    ) -> Tensor:
        if self.heads is not None and self._tokens_ahead:
            embed = self.embedding if self.pre_process else None
            states = self.heads(hidden_states, embed, self._tokens_ahead, rotary_pos_emb, packed_seq_params)
            self.ahead = [self.output_layer(state)[0].transpose(0, 1) for state in states]
        return super()._postprocess(
            hidden_states=hidden_states,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **settings,
        )

    def _is_in_embd_group(self) -> bool:
        """Return False, so that the stages do not exchange weights before these are read."""
        return False


def freeze_row(embedding: Any, token: int) -> None:
    """Block gradients of the embedding of ``token``, as Transformers does for the padding token.

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
    """x / √(mean x² + ε) · w, computed in fp32 as Transformers does (arXiv:1910.07467).

    With ``layernorm_zero_centered_gamma`` the factor is 1 + w, and is multiplied in fp32.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float, **settings: object) -> None:
        super().__init__()
        self.eps = eps
        self.is_zero_centred: bool = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # megatron-core then adds up the gradients of ranks that each saw a part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.is_zero_centred:
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class CausalAttention(nn.Module):
    """Causal attention over packed rows or over rows that are padded at their ends, with the heads of this rank.

    Ranks of a context-parallel group have a part of each sequence; for attention they exchange these for a part of the
    heads (:mod:`verl.utils.ulysses`). megatron-core's own exchange needs TransformerEngine.
    """

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **settings: object) -> None:
        super().__init__()
        self.group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self.rule = AttentionRule(softmax_scale or config.kv_channels**-0.5)

    def set_window(self, window: int | None) -> None:
        """Set the number of tokens that each token attends to, itself included; None for all before it."""
        self.rule = replace(self.rule, window=window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRow | None = None,
        **settings: object,
    ) -> Tensor:
        """Attend; ``query`` is (tokens, heads, head_dim) if packed, (length, bsz, heads, head_dim) if padded.

        Returns:
            (tokens, heads · head_dim), or (length, bsz, heads · head_dim).
        """
        if packed_seq_params is not None and packed_seq_params.packing is not None:
            # (1, heads, tokens, head_dim)
            q, k, v = self._full(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            packing = packed_seq_params.packing
            rule = self.rule
            if rule.window is not None and rule.window >= packing.longest:
                rule = replace(rule, window=None)
            return self._divided(attend_packed(q, k, v, packing, rule)).squeeze(0).flatten(1)
        q, k, v = self._full(x.permute(1, 2, 0, 3) for x in (query, key, value))  # (bsz, heads, length, head_dim)
        return self._divided(attend(q, k, v, self.rule).transpose(1, 2)).transpose(0, 1).flatten(2)

    def _full(self, tensors: Iterable[Tensor]) -> Sequence[Tensor]:
        return list(tensors) if self.group is None else heads_for_sequence(list(tensors), self.group)

    def _divided(self, output: Tensor) -> Tensor:
        """Return all heads of this rank's tokens; (bsz, length, heads, head_dim) both."""
        return output if self.group is None else gather_heads_scatter_seq(output, 2, 1, self.group)


class HiddenHead(nn.Module):
    """The last layer of a model, which returns hidden states; it replaces megatron-core's.

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

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **settings: object) -> tuple[Tensor, None]:
        """Return the hidden states of all tokens; their gradients must be the same on all tensor-parallel ranks."""
        if self.sequence_parallel:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            return gather(hidden, tensor_parallel_output_grad=False), None
        return hidden, None
