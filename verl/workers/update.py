"""Partition of a batch into optimizer steps, and reduction of their metrics, for actor and critic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms import prepare_policy_loss
from verl.config import ActorConfig
from verl.errors import ConfigError
from verl.protocol import DataProto, replace_columns
from verl.utils.metric import Metrics, extreme
from verl.workers.engine import BaseEngine, MicroBatchConfig
from verl.workers.engine.non_finite import NonFinite


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """Division of one batch into optimizer steps."""

    mini_batch_size: int
    """Sequences per rank and optimizer step, unless the batch names other sizes."""
    micro: MicroBatchConfig
    epochs: int = 1
    """Passes over the batch."""
    shuffle_seed: int | None = None
    """Seed of a random order of the mini-batches, different in each step; None keeps their order."""
    temperature: float = 1.0

    def mini_batches(self, size: int, step: int, sizes: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Iterate over the row numbers of each optimizer step, epoch after epoch.

        Args:
            size: rows of this rank; mini-batch k is the k-th contiguous part.
            step: of the training; the order of the mini-batches depends on it.
            sizes: rows of each mini-batch on this rank; None for parts of ``mini_batch_size``.

        Raises:
            ConfigError: ``size`` is not that of the mini-batches.
        """
        ends = list(itertools.accumulate(self.sizes(size) if sizes is None else sizes))
        if not ends or ends[-1] != size:
            raise ConfigError(f"mini-batches of {sizes} sequences are not the {size} sequences of this rank.")
        parts = [list(range(start, end)) for start, end in itertools.pairwise([0, *ends])]
        # The same order on every rank: rank r holds its share of mini-batch k as its own k-th part.
        # A large prime apart, so that neighbouring seeds do not give the same orders some steps later.
        generator = torch.Generator().manual_seed((self.shuffle_seed or 0) * 1_000_003 + step)
        for _ in range(self.epochs):
            count = len(parts)
            keeps_order = self.shuffle_seed is None
            for k in range(count) if keeps_order else torch.randperm(count, generator=generator).tolist():
                yield parts[k]

    def sizes(self, size: int) -> list[int]:
        """Return the rows of each mini-batch of equal parts.

        Raises:
            ConfigError: ``size`` is no multiple of the mini-batch size.
        """
        if self.mini_batch_size < 1 or size % self.mini_batch_size:
            raise ConfigError(
                f"{size} sequences of this rank do not divide into mini-batches of {self.mini_batch_size}. Make "
                "train_batch_size a multiple of ppo_mini_batch_size."
            )
        return [self.mini_batch_size] * (size // self.mini_batch_size)


def mini_batch_size_per_rank(name: str, prompts: int, n: int, dp_size: int) -> int:
    """Convert ``ppo_mini_batch_size``, prompts of all ranks, to sequences per rank with ``n`` responses per prompt.

    Raises:
        ConfigError: the responses of a mini-batch do not divide over the ranks; ``name`` is the setting in the message.
    """
    if prompts * n % dp_size:
        raise ConfigError(
            f"{name}={prompts} with n={n} makes mini-batches of {prompts * n} responses, which do not divide "
            f"over {dp_size} ranks. Make {name} · n a multiple of {dp_size}."
        )
    return prompts * n // dp_size


def prepared_again(part: DataProto, engine: BaseEngine, plan: UpdatePlan, config: ActorConfig) -> DataProto:
    """Select the tokens of a mini-batch again, by the policy as it is now; collective.

    The driver prepared the columns of the loss by the policy before the update, which is that of the first mini-batch
    alone. This costs a forward pass, whose log-probs the loss's ``prepare`` gets as ``old_log_probs``.

    Args:
        part: this rank's rows of the mini-batch.
        engine: the policy's.
        plan: size of the passes, and temperature.
        config: the actor section.
    """
    log_probs = engine.infer_batch(part, {"log_probs"}, plan.micro, plan.temperature)["log_probs"]
    columns = {name: column for name, column in part.batch.items() if column.shape == log_probs.shape}
    columns |= {"old_log_probs": log_probs, "input_ids": part.batch["input_ids"]}
    ranks: list[dict[str, Tensor]] = [columns]
    if (size := engine.get_data_parallel_size()) > 1:
        ranks = [{} for _ in range(size)]
        dist.all_gather_object(ranks, columns, group=engine.get_data_parallel_group())
    gathered = {name: torch.cat([columns[name] for columns in ranks]) for name in columns}
    # What is drawn at random depends on the order of rows, and the order in which ranks have them on their number.
    ids = gathered.pop("input_ids").cpu().numpy()
    order = torch.tensor(sorted(range(len(ids)), key=lambda row: ids[row].tobytes()))
    ordered = {name: column[order] for name, column in gathered.items()}
    prepared = prepare_policy_loss(config.policy_loss.loss_mode, ordered, config, seed=engine.weight_version)
    first = sum(len(columns["old_log_probs"]) for columns in ranks[: engine.get_data_parallel_rank()])
    rows = order.argsort()[first : first + len(part)]
    return replace_columns(part, DataProto.from_dict(tensors={name: column[rows] for name, column in prepared.items()}))


# Reported by engines without a prefix, and reduced in another way than the metrics of losses.
_ENGINE_METRICS = {"grad_norm", "skipped_steps", "loss_scale"}


@dataclass
class OptimizerSteps:
    """Reports of the optimizer steps of one batch."""

    reports: list[dict[str, float]] = field(default_factory=list)
    problems: list[NonFinite] = field(default_factory=list)
    """Non-finite values that made steps be skipped, by rows of this rank's batch."""
    expert_counts: Tensor | None = None
    """(layers, experts) tokens of each expert, over all steps; see :attr:`BaseEngine.expert_counts`."""

    def add(
        self,
        report: dict[str, float],
        non_finite: Sequence[NonFinite],
        rows: Sequence[int],
        expert_counts: Tensor | None = None,
    ) -> None:
        """Add an engine's report of a step on ``rows`` of this rank's batch."""
        self.reports.append(report)
        if expert_counts is not None:
            self.expert_counts = expert_counts if self.expert_counts is None else self.expert_counts + expert_counts
        self.problems += [
            problem if problem.row is None else replace(problem, row=rows[problem.row]) for problem in non_finite
        ]

    def metrics(self, prefix: str, lr: float) -> Metrics:
        """Reduce the metrics of all steps.

        Args:
            prefix: of the engine's own metrics: ``actor`` or ``critic``.
            lr: learning rate of the steps.

        Returns:
            the mean of each metric (names that end in ``_max`` or ``_min``: the extreme), ``{prefix}/grad_norm`` over
            the steps that were not skipped, the number of skipped ones as ``{prefix}/skipped_steps``, and
            ``{prefix}/lr``; in fp16 the last ``{prefix}/loss_scale``.
        """
        metrics: Metrics = {}
        for name in sorted({key for report in self.reports for key in report} - _ENGINE_METRICS):
            values = [report[name] for report in self.reports if name in report]
            is_extreme = name.endswith(("_max", "_min"))
            metrics[name] = extreme(name, values) if is_extreme else sum(values) / len(values)
        # The norm of a skipped step is not finite, and so would be the mean.
        grad_norms = [report["grad_norm"] for report in self.reports if not report["skipped_steps"]]
        metrics[f"{prefix}/grad_norm"] = sum(grad_norms) / len(grad_norms) if grad_norms else math.nan
        metrics[f"{prefix}/skipped_steps"] = sum(report["skipped_steps"] for report in self.reports)
        metrics[f"{prefix}/lr"] = lr
        if "loss_scale" in self.reports[-1]:
            metrics[f"{prefix}/loss_scale"] = self.reports[-1]["loss_scale"]
        return metrics
