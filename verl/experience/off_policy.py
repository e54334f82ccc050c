"""Age of the weights that sampled the tokens of a batch: the column ``updates_behind`` and its metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.experience.sequences import Trajectories
from verl.protocol import DataProto, replace_columns
from verl.utils.metric import Metrics

PREFIX = "training/off_policy"


def with_age(batch: DataProto, updates: int) -> DataProto:
    """Add ``updates_behind`` to responses that were all drawn ``updates`` updates of the policy before this step."""
    is_sampled = batch.batch["response_mask"].bool()
    column = torch.full(is_sampled.shape, -1, dtype=torch.int32).masked_fill(is_sampled, updates)
    return replace_columns(batch, DataProto.from_dict(tensors={"updates_behind": column}))


def off_policy_metrics(batch: DataProto) -> Metrics:
    """Measure the age of the tokens that a step trains on, in updates of the policy.

    A bound on the age of samples counts from the start of their prompt, so no token is older than it.
    With a(t) the ``updates_behind`` of a token that the policy drew, over the trajectories that have one, all their
    sequences together::

        trajectory_staleness/{mean,max,min}          min_t a(t): the age of its newest token
        trajectory_staleness_worst/{mean,max,min}    max_t a(t): the age of its oldest token
        trajectory_spans/{mean,max,min}              the difference: updates of the policy while it was drawn
        tokens_by_age/<a>                            share of the tokens with a(t) = a, for a from 0 to the largest

    All are under ``training/off_policy/``; those of fully_async are the same spans::

        fully_async/partial/total_partial_num        trajectories that more than one version drew: span > 0
        fully_async/partial/partial_ratio            their share of the trajectories
        fully_async/partial/max_partial_span         the largest span

    Returns:
        nothing if the batch has no column ``updates_behind``, or the policy drew no token.
    """
    ages = batch.batch.get("updates_behind", None)
    if ages is None or not (ages >= 0).any():
        return {}
    oldest, newest = _extreme_ages(batch, ages)
    spans = oldest - newest
    metrics: Metrics = {}
    for name, values in (
        ("trajectory_staleness", newest),
        ("trajectory_staleness_worst", oldest),
        ("trajectory_spans", spans),
    ):
        metrics[f"{PREFIX}/{name}/mean"] = values.double().mean().item()
        metrics[f"{PREFIX}/{name}/max"] = float(values.max())
        metrics[f"{PREFIX}/{name}/min"] = float(values.min())
    tokens = torch.bincount(ages[ages >= 0])
    shares = (tokens.double() / tokens.sum()).tolist()
    metrics |= {f"{PREFIX}/tokens_by_age/{age}": share for age, share in enumerate(shares)}
    return metrics | {
        "fully_async/partial/total_partial_num": float((spans > 0).sum()),
        "fully_async/partial/partial_ratio": (spans > 0).double().mean().item(),
        "fully_async/partial/max_partial_span": float(spans.max()),
    }


def _extreme_ages(batch: DataProto, ages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest age of each trajectory that has a token."""
    none = torch.iinfo(ages.dtype).max
    trajectories = Trajectories.from_batch(batch)
    rows = torch.tensor(trajectories.indices)
    oldest = ages.new_full((len(trajectories),), -1).scatter_reduce(0, rows, ages.amax(-1), "amax")
    row_minimum = ages.masked_fill(ages < 0, none).amin(-1)
    newest = ages.new_full((len(trajectories),), none).scatter_reduce(0, rows, row_minimum, "amin")
    has_tokens = oldest >= 0
    return oldest[has_tokens], newest[has_tokens]
