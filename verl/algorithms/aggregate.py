"""Reduction of per-token losses to a scalar, with the denominators of the whole mini-batch."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from verl.algorithms.groups import GroupIds, group_numbers
from verl.base.registry import suggest
from verl.errors import ConfigError
from verl.utils.torch_functional import entropy_from_logits, zero_masked

LOSS_AGG_MODES = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean",
)  # fmt: skip


class LossTotals(TypedDict, total=False):
    """Denominators of a mini-batch, as arguments of :func:`agg_loss`."""

    dp_size: int
    batch_num_tokens: float | Tensor | None
    global_batch_size: float | Tensor | None
    loss_scale_factor: float | None
    row_weights: Tensor | None
    index: GroupIds | None


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    row_weights: Tensor | None = None,
    index: GroupIds | None = None,
) -> Tensor:
    """Reduce per-token losses to a scalar, with the denominators of the whole mini-batch.

    With l the losses, m the mask, N the valid tokens and B the sequences of the mini-batch over
    all ranks, and dp the number of ranks (gradients are averaged over ranks, so each is scaled by dp)::

        token-mean               dp · Σ_i Σ_t l·m / N
        token-sum                dp · Σ_i Σ_t l·m
        seq-mean-token-sum       dp · Σ_i (Σ_t l·m) / B
        seq-mean-token-mean      dp · Σ_i (Σ_t l·m / Σ_t m) / B
        seq-mean-token-sum-norm  dp · Σ_i (Σ_t l·m) / (B · S)    S = loss_scale_factor or response_length
        prompt-mean              dp · Σ_g (Σ_{i in g} Σ_t l·m / N_g) / G    over the groups of the mini-batch

    In ``prompt-mean`` every prompt has the same weight, and so has every token inside its group of N_g tokens.
    ``seq-mean-token-sum-norm`` is Dr. GRPO's constant length normaliser (arXiv:2503.20783).

    If a trajectory is several rows (training sequences of an agent loop), B and the inner mean of
    ``seq-mean-token-mean`` are those of trajectories: each has the loss that it would have as one sequence.

    Over any partition of a mini-batch into micro-batches and ranks, the sum of ``agg_loss(part, **totals) / dp_size``
    equals ``agg_loss(whole)``. A sequence without a valid token adds nothing, but counts in B. Values of ``loss_mat``
    at masked positions are ignored, NaN included.

    Args:
        loss_mat: (bsz, response_length) per-token losses.
        loss_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: one of the modes above.
        dp_size: data-parallel ranks.
        batch_num_tokens: N; None takes the valid tokens of ``loss_mask``.
        global_batch_size: B; None takes the rows of ``loss_mat``.
        loss_scale_factor: S; None takes the width of ``loss_mat``.
        row_weights: (bsz,) weight of each of the row's tokens in ``prompt-mean``, 1 / (G · N_g) of its group, and in
            ``seq-mean-token-mean`` if trajectories have several rows, 1 / (B · tokens of its trajectory).
        index: (bsz,) group ids, from which ``prompt-mean`` computes the weights if ``loss_mat`` is the whole
            mini-batch.

    Returns:
        scalar, connected to the graph even if no token is valid.

    Raises:
        ConfigError: there is no such mode, or ``prompt-mean`` is given neither weights nor groups.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ConfigError(
            f"unknown loss_agg_mode '{loss_agg_mode}'.{suggest(loss_agg_mode, list(LOSS_AGG_MODES))} "
            f"Known: {', '.join(LOSS_AGG_MODES)}."
        )
    losses = zero_masked(loss_mat, loss_mask)
    lengths = loss_mask.bool().sum(-1)  # (bsz,)
    tokens = lengths.sum() if batch_num_tokens is None else batch_num_tokens
    sequences = loss_mat.shape[0] if global_batch_size is None else global_batch_size
    if loss_agg_mode == "token-mean":
        # At least 1 here and below: a mini-batch without valid tokens has loss 0, not NaN.
        return dp_size * losses.sum() / torch.as_tensor(tokens).clamp(min=1)
    if loss_agg_mode == "token-sum":
        return dp_size * losses.sum()
    per_sequence = losses.sum(-1)  # (bsz,)
    if loss_agg_mode == "prompt-mean":
        weights = _row_weights(loss_mask, index) if row_weights is None else row_weights
        return dp_size * (per_sequence * weights).sum()
    if loss_agg_mode == "seq-mean-token-mean":
        if row_weights is not None:
            return dp_size * (per_sequence * row_weights).sum()
        per_sequence = per_sequence / lengths.clamp(min=1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / (loss_scale_factor or max(loss_mat.shape[-1], 1))
    return dp_size * per_sequence.sum() / torch.as_tensor(sequences).clamp(min=1)


def prepare_aggregation(
    loss_agg_mode: str, response_mask: Tensor, index: GroupIds, trajectories: GroupIds | None = None
) -> dict[str, Tensor]:
    """Return the columns that an aggregation needs from the whole mini-batch; none in most cases.

    For ``prompt-mean`` that is ``row_weights``, (bsz,) float32: 1 / (G · N_g), with N_g the valid tokens of the row's
    group in this mini-batch and G the number of groups that have any. A group without a valid token is not counted in
    G, so a prompt whose rewards all failed does not shrink the loss of the others.

    If trajectories have several rows, it is ``trajectory_count``, (bsz,) int64: 1 on the first row of each trajectory
    and 0 on its others, whose sum is the B of :func:`agg_loss`; and for ``seq-mean-token-mean`` the ``row_weights``
    1 / (B · N_i), with N_i the valid tokens of the row's trajectory.

    Args:
        loss_agg_mode: see :func:`agg_loss`.
        response_mask: (bsz, response_length) of all rows of the mini-batch, over all ranks.
        index: (bsz,) group ids of these rows, for ``prompt-mean``.
        trajectories: (bsz,) ids of their trajectories, if one may have several rows.

    Raises:
        ConfigError: the number of ids differs from that of the rows.
    """
    prepared: dict[str, Tensor] = {}
    if trajectories is not None:
        group_ids = group_numbers(trajectories)
        # Ids count in order of appearance, so the first row of each trajectory has a new maximum.
        is_first = torch.ones_like(group_ids)
        is_first[1:] = (group_ids[1:] > group_ids.cummax(0).values[:-1]).long()
        prepared["trajectory_count"] = is_first.to(response_mask.device)
    if loss_agg_mode == "prompt-mean":
        if len(index) != len(response_mask):
            raise ConfigError(
                f"prompt-mean got {len(index)} group ids for {len(response_mask)} rows; pass one per row."
            )
        prepared["row_weights"] = _token_weights(response_mask, index, counts_empty=False)
    elif loss_agg_mode == "seq-mean-token-mean" and trajectories is not None:
        prepared["row_weights"] = _token_weights(response_mask, trajectories, counts_empty=True)
    return prepared


def _token_weights(response_mask: Tensor, index: GroupIds, counts_empty: bool) -> Tensor:
    """Weights (bsz,) of a mean over groups of the means over their tokens; ``counts_empty``: of groups without one."""
    groups = group_numbers(index)
    lengths = response_mask.bool().sum(-1).cpu()
    tokens = torch.zeros(len(groups), dtype=torch.int64).index_add_(0, groups, lengths)  # by group
    count = len(groups.unique()) if counts_empty else int((tokens > 0).sum())
    weights = 1.0 / (count * tokens[groups].double()).clamp(min=1.0)
    weights[tokens[groups] == 0] = 0.0
    return weights.float().to(response_mask.device)


def _row_weights(loss_mask: Tensor, index: GroupIds | None) -> Tensor:
    if index is None:
        raise ConfigError(
            "loss_agg_mode='prompt-mean' needs to know which rows share a prompt: pass row_weights=..., the column "
            "that prepare_aggregation makes from the whole mini-batch (config.global_batch_info carries it during an "
            "update), or index=... if these rows are the whole mini-batch."
        )
    return prepare_aggregation("prompt-mean", loss_mask, index)["row_weights"]


def compute_entropy_loss(
    logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean", **totals: Unpack[LossTotals]
) -> Tensor:
    """Entropy of softmax(logits), aggregated like a loss; PPO adds ``-entropy_coeff`` times this.

    ``logits`` is (bsz, response_length, vocabulary); the other arguments are those of :func:`agg_loss`.
    """
    logits = zero_masked(logits, response_mask.unsqueeze(-1))
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, **totals)
