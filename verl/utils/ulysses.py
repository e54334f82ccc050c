"""DeepSpeed-Ulysses sequence parallelism (https://arxiv.org/abs/2309.14509): exchange parts of a sequence for heads.

P ranks hold the same batch, each an equal part of every sequence, with all heads. Everything in a decoder but attention
treats each token alone. Attention treats each head alone, so before it an all-to-all gives each rank the whole sequence
of 1/P of the heads, and after it a second one gives back a part of the sequence with all heads.

The functions take the process group as an argument. Without it they use the one that is set in this process, which the
engines do while they compute; without any group the sequence is not divided, and tensors pass unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.base.types import AutogradContext

Group = dist.ProcessGroup | None

_group: Group = None


def set_ulysses_sequence_parallel_group(group: Group) -> None:
    """Set the ranks of this process that share a sequence; None if it is not divided."""
    global _group
    _group = group


def get_ulysses_sequence_parallel_group() -> Group:
    """Return the ranks that share a sequence; None if it is not divided."""
    return _group


def get_ulysses_sequence_parallel_world_size(group: Group = None) -> int:
    """Return the number of ranks that share a sequence; 1 if it is not divided."""
    group = group or _group
    return 1 if group is None else dist.get_world_size(group)


def get_ulysses_sequence_parallel_rank(group: Group = None) -> int:
    """Return the index of this rank's part of the sequence; 0 if it is not divided."""
    group = group or _group
    return 0 if group is None else dist.get_rank(group)


def validate_ulysses_config(num_heads: int, ulysses_sequence_size: int) -> None:
    """Raise ConfigError if ``ulysses_sequence_size`` ranks cannot share ``num_heads`` query heads equally."""
    if num_heads % ulysses_sequence_size:
        good = ", ".join(str(d) for d in range(1, num_heads + 1) if num_heads % d == 0)
        raise ConfigError(
            f"ulysses_sequence_parallel_size={ulysses_sequence_size} does not divide the model's {num_heads} attention "
            f"heads: each rank computes the attention of an equal number of heads. Use one of {good}."
        )


# ---- the exchange ---------------------------------------------------------------------------------


class _AllToAll(torch.autograd.Function):
    """Send ``x[r]`` to rank r; the result at r is what rank r sent. Its transpose is itself."""

    @staticmethod
    def forward(ctx: AutogradContext[dist.ProcessGroup], x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.settings = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: AutogradContext[dist.ProcessGroup], *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.settings), None  # pyright: ignore[reportReturnType]


def all_to_all_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``x[r]`` to rank r and return what rank r sent at r; x is (ranks, ...). Differentiable, collective."""
    return _AllToAll.apply(x, group)  # pyright: ignore[reportReturnType]


def all_to_all_tensor(
    local_input: Tensor, scatter_dim: int, gather_dim: int, group: Group = None, async_op: bool = False
) -> Tensor:
    """Divide ``scatter_dim`` over the ranks and collect ``gather_dim`` from them, in rank order. Collective.

    It is differentiable. ``async_op`` must be false: the result is used at once.

    Raises:
        ConfigError: ``async_op``, or the ranks do not divide ``scatter_dim``.
    """
    group = group or _group
    if async_op:
        raise ConfigError("all_to_all_tensor: async_op=True is not supported, since its result is differentiable.")
    if group is None:
        return local_input
    ranks = dist.get_world_size(group)
    if local_input.shape[scatter_dim] % ranks:
        raise ConfigError(
            f"all_to_all_tensor: dimension {scatter_dim} of {tuple(local_input.shape)} does not divide over {ranks} "
            "ranks. Pad it, or use a sequence-parallel size that divides it."
        )
    received = all_to_all_parts(torch.stack(local_input.chunk(ranks, dim=scatter_dim)), group)
    return torch.cat(received.unbind(0), dim=gather_dim)


def gather_seq_scatter_heads(
    x: Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int = 0, group: Group = None
) -> Tensor:
    """Turn a part of the sequence with all heads into the whole sequence of this rank's heads. Collective.

    Args:
        x: ``seq_dim`` has the part, ``head_dim`` all heads.
        seq_dim: dimension of the sequence.
        head_dim: dimension of the heads.
        unpadded_dim_size: length of the sequence without the padding that made its parts equal; 0 keeps the padding.
        group: the ranks that share the sequence.
    """
    group = group or _group
    if group is None:
        return x
    x = all_to_all_tensor(x, head_dim, seq_dim, group)
    return x.narrow(seq_dim, 0, unpadded_dim_size) if unpadded_dim_size else x


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: Group = None) -> Tensor:
    """Turn the whole sequence of this rank's heads into its part of the sequence with all heads. Collective.

    A sequence that does not divide over the ranks is padded with zeros at its end.
    """
    group = group or _group
    if group is None:
        return x
    return all_to_all_tensor(_padded_for(x, seq_dim, dist.get_world_size(group)), seq_dim, head_dim, group)


def heads_for_sequence(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Turn queries, keys and values of a part of the sequence into those of all of it, for this rank's heads.

    One all-to-all carries all tensors. Heads that the ranks cannot share equally (grouped keys and values) are repeated
    first, so that each rank gets those which its query heads read.

    Args:
        tensors: (bsz, heads, length / ranks, dim) each, the first with a number of heads that the ranks divide.
        group: the ranks that share the sequence. Collective.

    Returns:
        (bsz, heads / ranks, length, dim) each.
    """
    ranks = dist.get_world_size(group)
    bsz, _, part, _ = tensors[0].shape
    sent: list[Tensor] = []
    for x in tensors:
        heads = x.shape[1]
        x = x.repeat_interleave(math.lcm(heads, ranks) // heads, dim=1) if heads % ranks else x
        # (ranks, bsz, part, heads / ranks · dim)
        sent.append(x.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4).flatten(3))
    widths = [x.shape[-1] for x in sent]
    received = all_to_all_parts(torch.cat(sent, dim=-1), group)  # the first dimension is now the place in the sequence
    full_sequence = received.transpose(0, 1).reshape(bsz, ranks * part, -1)
    return [
        x.unflatten(-1, (-1, original.shape[-1])).transpose(1, 2)
        for x, original in zip(full_sequence.split(widths, dim=-1), tensors, strict=True)
    ]


# ---- inputs and outputs ---------------------------------------------------------------------------


def _padded_for(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Pad ``dim`` with zeros at its end to a multiple of ``ranks``."""
    extra = -x.shape[dim] % ranks
    if not extra:
        return x
    after = x.dim() - 1 - dim % x.dim()
    return functional.pad(x, (0, 0) * after + (0, extra))


def slice_input_tensor(x: Tensor, dim: int, padding: bool = True, group: Group = None) -> Tensor:
    """Return this rank's part of ``x`` along ``dim``; with ``padding`` zeros make the parts equal.

    Raises:
        ConfigError: the ranks do not divide ``dim``, and ``padding`` is false.
    """
    group = group or _group
    if group is None:
        return x
    ranks = dist.get_world_size(group)
    x = _padded_for(x, dim, ranks) if padding else x
    if x.shape[dim] % ranks:
        raise ConfigError(
            f"slice_input_tensor: dimension {dim} of {tuple(x.shape)} does not divide over {ranks} ranks. Pad it, or "
            "pass padding=True."
        )
    return x.chunk(ranks, dim=dim)[dist.get_rank(group)].contiguous()


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1, pad_value: int = 0
) -> tuple[Tensor, Tensor | None, int]:
    """Pad a packed row so that ``sp_size`` ranks can share it; the padding counts its positions from 0.

    Args:
        input_ids_rmpad: (1, tokens).
        position_ids_rmpad: (..., 1, tokens).
        sp_size: number of ranks.
        pad_value: id of the padding.

    Returns:
        both padded, and the number of tokens of padding.
    """
    extra = -input_ids_rmpad.shape[-1] % sp_size
    if not extra:
        return input_ids_rmpad, position_ids_rmpad, 0
    input_ids = functional.pad(input_ids_rmpad, (0, extra), value=pad_value)
    if position_ids_rmpad is not None:
        more = torch.arange(extra, device=position_ids_rmpad.device, dtype=position_ids_rmpad.dtype)
        more = more.expand(*position_ids_rmpad.shape[:-1], extra)
        position_ids_rmpad = torch.cat([position_ids_rmpad, more], dim=-1)
    return input_ids, position_ids_rmpad, extra


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor,
    position_ids_rmpad: Tensor | None = None,
    sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
    pad_value: int = 0,
) -> tuple[Tensor, Tensor | None, int]:
    """Pad a packed row as :func:`ulysses_pad`, and return this rank's part of it.

    ``skip_position_ids_rmpad`` leaves the positions whole, for models that divide them themselves.
    """
    input_ids, position_ids, extra = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size, pad_value)
    input_ids = slice_input_tensor(input_ids, dim=1, padding=False)
    if position_ids is not None and not skip_position_ids_rmpad:
        position_ids = slice_input_tensor(position_ids, dim=position_ids.dim() - 1, padding=False)
    return input_ids, position_ids, extra


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext[tuple[int, int, bool, dist.ProcessGroup]],
        x: Tensor,
        dim: int,
        scale: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.settings = dim, x.shape[dim], scale, group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(
        ctx: AutogradContext[tuple[int, int, bool, dist.ProcessGroup]], *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        dim, length, scale, group = ctx.settings
        local_grad = grads[0].narrow(dim, dist.get_rank(group) * length, length)
        return local_grad * dist.get_world_size(group) if scale else local_grad, None, None, None


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: Group = None,
) -> Tensor:
    """Collect the ranks' parts of an output along ``gather_dim``, without the padding. Collective.

    Every rank then computes the same loss, of whose gradient each gets its own part. With ``grad_scaler`` that part is
    multiplied by the number of ranks, because gradients are averaged over all ranks, also over those that share a
    sequence.

    Args:
        x: this rank's part.
        gather_dim: dimension of the sequence.
        unpad_dim: dimension from whose end the padding is removed; None removes none.
        padding_size: its size, as :func:`ulysses_pad` returned it.
        grad_scaler: multiply gradients by the number of ranks.
        group: the ranks that share the sequence.
    """
    group = group or _group
    if group is None:
        return x
    gathered: Tensor = _Gather.apply(x, gather_dim, grad_scaler, group)  # pyright: ignore[reportAssignmentType]
    if unpad_dim is None or not padding_size:
        return gathered
    return gathered.narrow(unpad_dim, 0, gathered.shape[unpad_dim] - padding_size)


class _PlacedOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext[int], values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.settings = dist.get_world_size(group)
        outputs = values.new_zeros(count, *values.shape[1:]).index_copy_(0, places, values)
        dist.all_reduce(outputs, group=group)
        return outputs

    @staticmethod
    def backward(ctx: AutogradContext[int], *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places) * ctx.settings, None, None, None


def place_outputs(values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Collect outputs of tokens that the ranks computed in unequal numbers. Collective.

    Gradients are those of :func:`gather_outputs_and_unpad` with ``grad_scaler``.

    Args:
        values: (n, ...) outputs of this rank's tokens.
        places: (n,) their places among all tokens; no place is another rank's too.
        count: number N of all tokens.
        group: the ranks that share the sequences.

    Returns:
        (N, ...), the same on every rank.
    """
    return _PlacedOutputs.apply(values, places, count, group)  # pyright: ignore[reportReturnType]
