"""The loop over mini-batches and epochs that the actor's and the critic's update share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.metric import extreme
from verl.workers.engine.base import BaseEngine, LossFn, MicroBatchConfig
from verl.workers.engine.non_finite import NonFinite


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """How one batch becomes optimizer steps."""

    mini_batch_size: int
    """Sequences of one rank per optimizer step."""
    micro: MicroBatchConfig
    epochs: int = 1
    """Passes over the batch."""
    shuffle_seed: int | None = None
    """Take the mini-batches in an order drawn from this seed and the step; None keeps theirs."""
    temperature: float = 1.0


def mini_batch_size_per_rank(name: str, prompts: int, n: int, dp_size: int) -> int:
    """Sequences of one rank per optimizer step, from prompts of all ranks.

    Args:
        name: the setting, for the error.
        prompts: ``ppo_mini_batch_size``.
        n: responses per prompt.
        dp_size: data-parallel ranks.

    Raises:
        ConfigError: the responses of a mini-batch do not divide over the ranks.
    """
    if prompts * n % dp_size:
        raise ConfigError(
            f"{name}={prompts} with rollout.n={n} makes mini-batches of {prompts * n} responses, which do not divide "
            f"over {dp_size} ranks. Make {name} · rollout.n a multiple of {dp_size}."
        )
    return prompts * n // dp_size


def update(
    engine: BaseEngine, batch: DataProto, loss_fn: LossFn, plan: UpdatePlan, prefix: str
) -> tuple[dict[str, float], list[NonFinite]]:
    """All optimizer steps of one batch, then one step of the schedule.

    Args:
        engine: in its training mode.
        batch: this rank's rows; mini-batch k is the k-th contiguous part.
        loss_fn: what is minimised.
        plan: sizes and order.
        prefix: ``actor`` or ``critic``: names the engine's own metrics.

    Returns:
        the mean of each metric over the steps, with ``{prefix}/grad_norm`` over the steps taken, their
        ``{prefix}/lr``, and in ``{prefix}/skipped_steps`` how many were not; and why they were not, with the
        rows of ``batch``.

    Raises:
        ConfigError: the batch does not divide into mini-batches.
    """
    steps, problems = [], []
    for rows in _mini_batches(batch, plan, engine.weight_version):
        steps.append(engine.train_batch(batch.select_idxs(rows), loss_fn, plan.micro, plan.temperature))
        problems += [one if one.row is None else replace(one, row=rows[one.row]) for one in engine.non_finite]
    own = {"grad_norm", "skipped_steps"}
    metrics = {name: _over_steps(name, steps) for name in sorted({key for step in steps for key in step} - own)}
    taken = [step["grad_norm"] for step in steps if not step["skipped_steps"]]
    metrics[f"{prefix}/grad_norm"] = sum(taken) / len(taken) if taken else math.nan
    metrics[f"{prefix}/skipped_steps"] = sum(step["skipped_steps"] for step in steps)
    metrics[f"{prefix}/lr"] = engine.lr_scheduler_step()
    return metrics, problems


def _mini_batches(batch: DataProto, plan: UpdatePlan, step: int) -> Iterator[list[int]]:
    size = plan.mini_batch_size
    if size < 1 or len(batch) % size:
        raise ConfigError(
            f"{len(batch)} sequences of this rank do not divide into mini-batches of {size}. Make train_batch_size a "
            "multiple of ppo_mini_batch_size."
        )
    parts = [list(range(start, start + size)) for start in range(0, len(batch), size)]
    # The same order on every rank: rank r holds its share of mini-batch k as its own k-th part.
    generator = torch.Generator().manual_seed((plan.shuffle_seed or 0) * 1_000_003 + step)
    for _ in range(plan.epochs):
        count = len(parts)
        order = range(count) if plan.shuffle_seed is None else torch.randperm(count, generator=generator).tolist()
        for k in order:
            yield parts[k]


def _over_steps(name: str, steps: list[dict[str, float]]) -> float:
    values = [step[name] for step in steps if name in step]
    return extreme(name, values) if name.endswith(("_max", "_min")) else sum(values) / len(values)
