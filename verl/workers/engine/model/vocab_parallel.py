"""Log-probs and entropies of tokens whose logits are divided over tensor-parallel ranks, never gathered.

Each rank has the rows of the output projection for its part of the vocabulary. For each token five numbers travel: the
largest logit, and four sums over the vocabulary; one more for each candidate, and two for each of the most likely
tokens. At most ``chunk_elements`` logits are in memory at once, in fp32, and they are computed again in the backward
pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from verl.workers.engine.model.head import (
    NO_TOP,
    PLAIN_LOGITS,
    LogitRule,
    StatisticsRequest,
    TokenStatistics,
    TopTokens,
    chunk_rows,
    columns_of,
    logit_gradients,
    logits_of,
    stacked,
)

if TYPE_CHECKING:
    from verl.base.types import AutogradContext


def vocabulary_rows(parameter: DTensor) -> Tensor:
    """Return this rank's rows of a parameter of the output projection, padded to equally many on each rank.

    Differentiable; the parameter, (V, H) or (V,), is divided by its first dimension alone.
    """
    rows = parameter.to_local()
    missing = -(-parameter.shape[0] // parameter.device_mesh.size()) - len(rows)
    return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def with_summed_gradient(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``hidden``, of which each rank of ``mesh`` has a copy; its gradient is the sum of those on all ranks."""
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return hidden.to_local(grad_placements=[Partial()])


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    chunk_elements: int | None = None,
    candidates: Tensor | None = None,
    top: TopTokens = NO_TOP,
    bias: Tensor | None = None,
    rule: LogitRule = PLAIN_LOGITS,
) -> TokenStatistics:
    """Compute log p(target), H(p) and Σ p² for p = softmax(rule(hidden Wᵀ + b) / temperature). Collective.

    With z the logits over temperature, m the largest and s = Σ exp(z - m) over all ranks:

        log p(y) = z_y - m - log s        H = log s - Σ exp(z - m) (z - m) / s        Σ p² = Σ exp(2(z - m)) / s²

    The gradient of ``hidden`` is this rank's term of a sum over ``group``; the caller adds the terms.

    Args:
        hidden: (N, H), the same on every rank of ``group``.
        weight: (ceil(V / ranks), H), this rank's rows of W; rows beyond V are padding.
        targets: (N,) ids of tokens.
        group: the tensor-parallel ranks, in the order of their rows.
        vocab_size: V.
        temperature: divisor of the logits.
        with_entropy: return H, which is differentiable.
        with_sum_pi_squared: return Σ p², which is not.
        chunk_elements: largest number of logits at once; None takes that of the device. One row of them is computed at
            once in any case.
        candidates: (N, K) ids of tokens whose log-probs are returned too, differentiable.
        top: number of the most likely tokens that are returned.
        bias: (ceil(V / ranks),) this rank's part of b.
        rule: what the model does to its logits.
    """
    first = dist.get_rank(group) * len(weight)
    rows = chunk_rows(weight, chunk_elements)  # by the padded size, so that all ranks make as many collectives
    count = max(vocab_size - first, 0)
    local_weight, local_bias = weight[:count], None if bias is None else bias[:count]
    request = StatisticsRequest(with_entropy, with_sum_pi_squared, candidates is not None, top)
    settings = group, first, temperature, rows, request, rule
    ids = stacked(targets, candidates)
    return request.statistics(_VocabParallel.apply(hidden, local_weight, local_bias, ids, settings))  # type: ignore[misc]


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext[tuple[int, float, LogitRule, int, torch.dtype]],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: tuple[dist.ProcessGroup, int, float, int, StatisticsRequest, LogitRule],
    ) -> tuple[Tensor, ...]:
        group, first, temperature, rows, request, rule = settings
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(targets.shape, dtype=wide)
        log_z, entropy, squares, agreement = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(4))
        top_ids = targets.new_empty(len(hidden), request.top.count)
        top_log_probs = log_probs.new_empty(top_ids.shape)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = logits_of(hidden[part], weight, bias, rule, wide).div_(temperature)
            # A rank may have no token of the vocabulary, only padding.
            largest = logits.amax(-1) if len(weight) else logits.new_full((len(logits),), float("-inf"))
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            shifted = logits.sub_(largest.unsqueeze(-1))
            exp = shifted.exp()
            target_logits = _values_at_targets(shifted, targets[part], first)
            sums = torch.stack([exp.sum(-1), (exp * shifted).sum(-1), exp.square().sum(-1), *target_logits.unbind(-1)])
            dist.all_reduce(sums, group=group)
            (total, weighted, square), target_logits = sums[:3], sums[3:].t()
            log_probs[part] = target_logits - total.log().unsqueeze(-1)
            if request.candidates:
                agreement[part] = (target_logits[:, 1] == 0).to(wide)  # its logit less the largest
            if request.top.count:
                values, top_ids[part] = _most_likely(shifted, request.top, first, group)
                top_log_probs[part] = values - total.log().unsqueeze(-1)
            log_z[part] = largest + total.log()
            entropy[part] = total.log() - weighted / total
            squares[part] = square / total.square()
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.settings = first, temperature, rule, rows, wide
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares, agreement, top_ids, top_log_probs)
        return log_probs, entropy, squares, agreement, top_ids, top_log_probs

    @staticmethod
    def backward(
        ctx: AutogradContext[tuple[int, float, LogitRule, int, torch.dtype]], *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        first, temperature, rule, rows, wide = ctx.settings
        return logit_gradients(ctx.saved_tensors, first, temperature, rule, rows, wide, ctx.needs_input_grad[1], grads)


def _values_at_targets(values: Tensor, targets: Tensor, first: int) -> Tensor:
    """Pick the columns ``targets`` (N, C) of ``values`` (N, count), 0 where another rank has them; without waiting."""
    column, is_here = columns_of(targets, first, values.shape[-1])
    if not values.shape[-1]:
        return values.new_zeros(targets.shape)
    return torch.where(is_here, values.gather(-1, column), 0)


def _most_likely(values: Tensor, top: TopTokens, first: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the largest of all ranks' ``values`` (N, count) and their tokens. Collective."""
    k = top.count
    best, ids = values.topk(min(k, values.shape[-1]))
    missing = (0, k - best.shape[-1])  # of a rank with fewer tokens of the vocabulary
    mine = [
        torch.nn.functional.pad(best, missing, value=float("-inf")),
        torch.nn.functional.pad(ids + first, missing),
    ]
    ranks = range(dist.get_world_size(group))
    rank_parts: list[Tensor] = []
    for part in mine:
        parts = [torch.empty_like(part) for _ in ranks]
        dist.all_gather(parts, part.contiguous(), group=group)
        rank_parts.append(torch.cat(parts, dim=-1))
    best, columns = rank_parts[0].topk(k)
    return best, rank_parts[1].gather(-1, columns)
