"""Divergences of two distributions over the whole vocabulary, without all logits (tokens x vocabulary) in memory.

The vocabulary of policy and teacher is the ids that both have: matrices that one of them has padded to more rows than
the other are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.distillation import DivergenceKind, divergence_gradient, divergence_terms
from verl.errors import SchemaError
from verl.workers.engine.model.head import LogitRule, add_product_, chunk_rows, logits_of

if TYPE_CHECKING:
    from verl.base.types import AutogradContext


@dataclass(frozen=True, kw_only=True)
class OutputMatrix:
    """The projection from a model's last hidden states to logits, whole on this rank."""

    weight: Tensor
    """(V, H)."""
    bias: Tensor | None
    """(V,), or None."""
    rule: LogitRule
    """Transformation of the projection's result: scale and soft cap."""
    temperature: float = 1.0
    """Divisor of the logits."""

    def at(self, temperature: float) -> OutputMatrix:
        """Return the same matrix with another temperature."""
        return replace(self, temperature=temperature)


@dataclass(frozen=True, kw_only=True)
class FullDivergence:
    """A divergence from teachers over the whole vocabulary."""

    kind: DivergenceKind
    teachers: Sequence[OutputMatrix]
    """One for each value of the column ``teacher_index``; with a single one that column is not read."""
    beta: float = 0.5
    """Weight of the teacher in the mixture of ``jsd``."""
    log_prob_min: float | None = None
    """Least logarithm in the formulas; None for none."""


class DivergenceStatistics(NamedTuple):
    """Statistics of N tokens, (N,) fp32 each."""

    divergence: Tensor
    """D(p, q) in nats, differentiable in the policy's hidden states and output matrix."""
    agreement: Tensor
    """1 where policy and teacher have the same most likely token, else 0."""
    teacher_entropy: Tensor
    """H(q) in nats."""


class _Chunk(NamedTuple):
    """Consecutive tokens of one teacher that are computed at once."""

    tokens: slice
    teacher: OutputMatrix


@dataclass(frozen=True)
class _Settings:
    spec: FullDivergence
    temperature: float
    rule: LogitRule
    ranges: Sequence[_Chunk]
    group: dist.ProcessGroup | None
    ids: slice
    """The ids of the vocabulary whose logits this rank computes."""


def vocabulary_divergence(
    hidden: Tensor,
    policy: OutputMatrix,
    teacher_hidden: Tensor | None,
    teacher_index: Tensor | None,
    spec: FullDivergence | None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_elements: int | None = None,
) -> DivergenceStatistics:
    """Compute D(p, q) of policy and teacher at N tokens, in fp32.

    At most ``chunk_elements`` logits of each model (see :func:`~verl.workers.engine.model.head.chunk_rows`; by default
    half as many as for log-probs) are in memory at once, and they are computed again in the backward pass. With z the
    policy's logits over temperature, its gradient is ∂D/∂z = h - p Σ h, h = p ∂D/∂p
    (:func:`~verl.algorithms.distillation.divergence_gradient`).

    Args:
        hidden: (N, H) of the policy. With ``group`` the same on its ranks, and its gradient is this rank's term of a
            sum.
        policy: its output matrix, which gets a gradient. With ``group`` this rank's rows of it, equally many on each
            rank; rows beyond ``vocab_size`` are padding.
        teacher_hidden: (N, at least the teacher's H) last hidden states.
        teacher_index: (N,) number of the teacher in ``spec.teachers``; None for a single one.
        spec: the divergence and the teachers.
        group: ranks that have the vocabulary in parts, in the order of their rows; None if this rank has all of it.
        vocab_size: V of all ranks; None for the rows of the policy's matrix.
        chunk_elements: largest number of logits of one model at once.
    """
    if spec is None:
        raise SchemaError("the output 'divergence' needs the teachers' output matrices: set engine.divergence first.")
    if teacher_hidden is None:
        raise SchemaError("the output 'divergence' needs the column 'teacher_hidden', which the batch lacks.")
    order: Tensor | None = None
    counts = [len(hidden)]
    if len(spec.teachers) > 1:
        if teacher_index is None:
            raise SchemaError(
                f"there are {len(spec.teachers)} teachers, and no column 'teacher_index' says whose row it is."
            )
        order = teacher_index.argsort(stable=True)
        counts = teacher_index.bincount(minlength=len(spec.teachers)).tolist()
        hidden, teacher_hidden = hidden[order], teacher_hidden[order]
    weight = policy.weight
    first = 0 if group is None else dist.get_rank(group) * len(weight)
    size = min(vocab_size or len(weight), *(len(teacher.weight) for teacher in spec.teachers))
    ids = slice(min(first, size), min(first + len(weight), size))
    # Two models' logits are in memory, so half as many of each.
    rows = max(1, chunk_rows(weight, chunk_elements) // (2 if chunk_elements is None else 1))
    ranges = list(_ranges(counts, rows, spec.teachers))
    settings = _Settings(spec, policy.temperature, policy.rule, ranges, group, ids)
    statistics = _Divergence.apply(hidden, weight, policy.bias, teacher_hidden, settings)  # type: ignore[misc]
    if order is not None:
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        statistics = (values[back] for values in statistics)
    return DivergenceStatistics(*statistics)


def _ranges(counts: Sequence[int], rows: int, teachers: Sequence[OutputMatrix]) -> Iterator[_Chunk]:
    start = 0
    for count, teacher in zip(counts, teachers, strict=True):
        for chunk in range(start, start + count, rows):
            yield _Chunk(slice(chunk, min(chunk + rows, start + count)), teacher)
        start += count


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext[tuple[_Settings, torch.dtype]],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec, group = settings.spec, settings.group
        wide = torch.promote_types(hidden.dtype, torch.float32)
        divergence, agreement, teacher_entropy, log_z, teacher_log_z, total = (
            hidden.new_empty(len(hidden), dtype=wide) for _ in range(6)
        )
        for part, teacher in settings.ranges:
            log_p = logits_of(hidden[part], weight[: _count(settings)], _local(bias, settings), settings.rule, wide)
            log_p.div_(settings.temperature)
            log_q = _teacher_logits(teacher_hidden[part], teacher, settings.ids, wide)
            best_p, best_q, log_z[part], teacher_log_z[part] = _largest_and_log_z(log_p, log_q, group)
            # The teacher's best token of this rank's part is the best of all, and the policy's too.
            if log_p.shape[-1]:
                own_best_q, best_id = log_q.max(-1, keepdim=True)
                agrees = ((own_best_q.squeeze(-1) == best_q) & (log_p.gather(-1, best_id).squeeze(-1) == best_p)).to(
                    wide
                )
            else:
                agrees = torch.zeros_like(best_p)
            log_p.sub_(log_z[part].unsqueeze(-1))
            log_q.sub_(teacher_log_z[part].unsqueeze(-1))
            arguments = log_p, log_q, spec.kind, spec.beta, spec.log_prob_min
            sums = [divergence_terms(*arguments).sum(-1), divergence_gradient(*arguments).sum(-1)]
            sums += [-log_q.exp().mul_(log_q).sum(-1), agrees]
            divergence[part], total[part], teacher_entropy[part], agrees = _added(torch.stack(sums), group)
            agreement[part] = agrees.clamp_max(1)
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden, log_z, teacher_log_z, total)
        ctx.settings = settings, wide
        ctx.mark_non_differentiable(agreement, teacher_entropy)
        return divergence, agreement, teacher_entropy

    @staticmethod
    def backward(ctx: AutogradContext[tuple[_Settings, torch.dtype]], *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, teacher_hidden, log_z, teacher_log_z, total = ctx.saved_tensors
        settings, wide = ctx.settings
        spec, rule, count = settings.spec, settings.rule, _count(settings)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None else None
        for part, teacher in settings.ranges:
            log_p = logits_of(hidden[part], weight[:count], _local(bias, settings), rule, wide)
            logits = log_p.clone() if rule.softcap is not None else log_p  # read by the rule if it has a soft cap
            log_p.div_(settings.temperature).sub_(log_z[part].unsqueeze(-1))
            log_q = _teacher_logits(teacher_hidden[part], teacher, settings.ids, wide)
            log_q.sub_(teacher_log_z[part].unsqueeze(-1))
            grad = divergence_gradient(log_p, log_q, spec.kind, spec.beta, spec.log_prob_min)
            del log_q
            grad.sub_(log_p.exp().mul_(total[part].unsqueeze(-1)))
            grad.mul_((grads[0][part] / settings.temperature).unsqueeze(-1))
            grad = rule.backward_(grad, logits).to(hidden.dtype)
            del log_p, logits
            grad_hidden[part] = grad @ weight[:count]
            if grad_weight is not None:
                add_product_(grad_weight[:count], grad.t(), hidden[part])
            if grad_bias is not None:
                grad_bias[:count] += grad.sum(0, dtype=wide)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _count(settings: _Settings) -> int:
    return settings.ids.stop - settings.ids.start


def _local(bias: Tensor | None, settings: _Settings) -> Tensor | None:
    return None if bias is None else bias[: _count(settings)]


def _teacher_logits(hidden: Tensor, teacher: OutputMatrix, ids: slice, dtype: torch.dtype) -> Tensor:
    """Compute the teacher's logits over temperature; rows of ``hidden`` are as wide as those of the widest teacher."""
    weight = teacher.weight[ids]
    bias = None if teacher.bias is None else teacher.bias[ids]
    states = hidden[:, : weight.shape[1]].to(weight.dtype)
    return logits_of(states, weight, bias, teacher.rule, dtype).div_(teacher.temperature)


def _largest_and_log_z(a: Tensor, b: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the largest logits of ``a`` and ``b`` over all ranks, and log Σ exp of each."""
    if group is None:
        return a.amax(-1), b.amax(-1), a.logsumexp(-1), b.logsumexp(-1)
    # A rank may have no token of the vocabulary, only padding.
    largest = torch.stack([x.amax(-1) if x.shape[-1] else x.new_full((len(x),), float("-inf")) for x in (a, b)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(x - m.unsqueeze(-1)).exp_().sum(-1) for x, m in zip((a, b), largest, strict=True)])
    dist.all_reduce(sums, group=group)
    log_z = largest + sums.log()
    return largest[0], largest[1], log_z[0], log_z[1]


def _added(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums
