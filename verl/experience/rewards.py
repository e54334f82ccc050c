"""The scored responses of a step, and metrics of them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from verl.experience.dynamic_sampling import informative_rows
from verl.experience.sequences import Trajectories, trajectory_scores
from verl.protocol import DataProto, response_lengths
from verl.supervision.killable_pool import STATUSES
from verl.utils.metric import Metrics, distribution, number_or_nan
from verl.workers.reward_manager.texts import response_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Scored = tuple[torch.Tensor, dict[str, list[Any]]]
"""Scores (bsz, response_length), and further values of the reward function by name, one per sample."""
TRAJECTORY_PREFIX = "trajectory: "
"""Prefix of the ``reward_status`` of a sample whose trajectory failed, so that there was nothing to score."""


class ScoredDraw(NamedTuple):
    """Responses that were drawn and scored together; see :meth:`RewardRecord.add`."""

    batch: DataProto
    names: list[str]
    rates: Metrics


class RewardRecord:
    """All responses scored in one step, including those that dynamic sampling dropped."""

    def __init__(self) -> None:
        self.draws: list[ScoredDraw] = []

    @property
    def batches(self) -> list[DataProto]:
        """The scored batches."""
        return [draw.batch for draw in self.draws]

    def add(self, batch: DataProto, names: Sequence[str], rates: Metrics) -> None:
        """Add a scored batch.

        Args:
            batch: with the columns of :func:`verl.experience.scoring.score_columns`.
            names: the columns made from the reward function's values.
            rates: the second result of :func:`verl.experience.scoring.leave_out_failed`.
        """
        self.draws.append(ScoredDraw(batch, list(names), rates))

    def generated_tokens(self) -> int:
        """Number of tokens in all responses."""
        return sum(int(response_lengths(batch).sum()) for batch in self.batches)

    def metrics(self) -> Metrics:
        """Compute ``reward/...`` and ``train-source/...`` over all scored responses."""
        scored_rows = [Trajectories.from_batch(batch).scored_rows for batch in self.batches]
        sizes = [len(rows) for rows in scored_rows]
        metrics = {
            name: float(np.average([draw.rates[name] for draw in self.draws], weights=sizes))
            for name in self.draws[0].rates
        }
        extra = {
            name: [
                value
                for batch, rows in zip(self.batches, scored_rows, strict=True)
                for value in batch.non_tensor_batch.get(name, np.full(len(batch), None))[rows]
            ]
            for name in dict.fromkeys(name for draw in self.draws for name in draw.names)
        }
        scored = DataProto.concat(
            [
                batch.select(
                    batch_keys=["responses", "attention_mask"],
                    non_tensor_batch_keys=[name for name in ("data_source",) if name in batch.non_tensor_batch],
                ).select_idxs(rows)
                for batch, rows in zip(self.batches, scored_rows, strict=True)
            ]
        )
        scores = torch.cat([trajectory_scores(batch, batch.batch["token_level_scores"]) for batch in self.batches])
        by_source = metrics_by_source(scored, scores, extra["reward_status"])
        return metrics | component_metrics(extra) | by_source | self._equal_groups()

    def scored(self) -> Iterator[tuple[DataProto, int, float]]:
        """Yield batch, scored row and score of each trajectory that could be scored."""
        for batch in self.batches:
            scores = trajectory_scores(batch, batch.batch["token_level_scores"]).tolist()
            for row, score in zip(Trajectories.from_batch(batch).scored_rows, scores, strict=True):
                if batch.non_tensor_batch["reward_status"][row] == "ok":
                    yield batch, row, score

    def _equal_groups(self) -> Metrics:
        """``reward/equal_group_rate``: fraction of prompts with several scored responses of one and the same score."""
        groups: dict[str, list[float]] = {}
        for batch, row, score in self.scored():
            groups.setdefault(str(batch.non_tensor_batch["uid"][row]), []).append(score)
        equal = [_are_equal(scores) for scores in groups.values() if len(scores) > 1]
        return {"reward/equal_group_rate": sum(equal) / len(equal)} if equal else {}


class EqualScores:
    """Warns once when all responses of several steps in a row have the same score, which teaches nothing."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, steps: int = 3) -> None:
        self.tokenizer = tokenizer
        self.steps = steps
        self._row = 0
        self._is_told = False

    def check(self, record: RewardRecord) -> None:
        """Check the scores of a step."""
        scored = list(record.scored())
        self._row = self._row + 1 if len(scored) > 1 and _are_equal([score for *_, score in scored]) else 0
        if self._row < self.steps or self._is_told:
            return
        self._is_told = True
        batch, row, score = scored[0]
        cut = [
            b.non_tensor_batch["finish_reason"][r] == "length"
            for b, r, _ in scored
            if "finish_reason" in b.non_tensor_batch
        ]
        response = response_texts(batch.select_idxs([row]), self.tokenizer)[0].solution_str
        truth = batch.non_tensor_batch.get("reward_model", [None] * len(batch))[row]
        logger.warning(
            "all responses of each of the last %d steps have the same score, %d with %g in this step: nothing tells a "
            "better one from a worse. Usual causes: the answer is not in the form that the scorer looks for, or was "
            "cut (%d of %d ended at data.max_response_length); the scorer or the ground truth is not that of the data; "
            "the prompts are far too hard or too easy. One response and what it was compared with:\n%.400s\n%.200s",
            self.steps, len(scored), score, sum(cut), len(scored), response, truth,
        )  # fmt: skip


def status_metrics(statuses: Sequence[str]) -> Metrics:
    """Fraction of samples that could not be scored: ``reward/error_rate``, and ``reward/status/{status}`` for each.

    Failed trajectories are not among them.

    >>> metrics = status_metrics(["ok", "timeout", "ok", "error"])
    >>> metrics["reward/error_rate"], metrics["reward/status/timeout"], metrics["reward/status/crashed"]
    (0.5, 0.25, 0.0)
    """
    counts, size = Counter(statuses), max(len(statuses), 1)
    failed = sum(
        count for status, count in counts.items() if status != "ok" and not status.startswith(TRAJECTORY_PREFIX)
    )
    rates = {f"reward/status/{status}": counts[status] / size for status in STATUSES if status != "ok"}
    return {"reward/error_rate": failed / size} | rates


def component_metrics(extra: Mapping[str, Sequence[object]]) -> Metrics:
    """Compute ``reward/{name}/mean``, ``/max`` and ``/min`` of every numeric value of the reward function.

    Samples that were not scored, or whose value is missing or not finite, are left out. A name is skipped if any scored
    sample has a non-numeric value for it.

    Args:
        extra: the second result of :func:`verl.experience.scoring.compute_reward`.
    """
    statuses = extra.get("reward_status")
    metrics: Metrics = {}
    for name, values in extra.items():
        scored = [value for row, value in enumerate(values) if statuses is None or statuses[row] == "ok"]
        if all(isinstance(value, bool | int | float | None) for value in scored):
            present = [converted for converted in map(number_or_nan, scored) if not math.isnan(converted)]
            metrics |= distribution(present, f"reward/{name}") if present else {}
    return metrics


def metrics_by_source(batch: DataProto, scores: torch.Tensor, statuses: Sequence[object]) -> Metrics:
    """Compute ``train-source/{data_source}/...`` if there are several sources; mean scores leave out failed samples.

    ``scores`` are those of whole responses, (bsz,).
    """
    sources = [str(source) for source in batch.non_tensor_batch.get("data_source", [])]
    if len(set(sources)) < 2:
        return {}
    is_scored = torch.tensor([status == "ok" for status in statuses])
    values = torch.where(is_scored, scores, torch.nan)
    return source_metrics(sources, values.tolist(), response_lengths(batch).tolist())


def source_metrics(sources: Sequence[str], scores: Sequence[float], lengths: Sequence[float]) -> Metrics:
    """Compute mean score, mean response length and number of responses of each data source.

    >>> source_metrics(["a", "b", "a"], [1.0, 0.0, 0.0], [4, 5, 8])["train-source/a/score/mean"]
    0.5

    Args:
        sources: (bsz,) the ``data_source`` of each response.
        scores: (bsz,) the sum of its ``token_level_scores``; NaN where scoring failed; such rows are not in the mean.
        lengths: (bsz,) its number of tokens.

    Returns:
        ``train-source/{source}/score/mean`` (absent if no response of the source was scored),
        ``train-source/{source}/response_length/mean`` and ``train-source/{source}/count``.
    """
    names, values, tokens = np.asarray(sources, dtype=object), np.asarray(scores, float), np.asarray(lengths, float)
    metrics: Metrics = {}
    for source in dict.fromkeys(sources):
        rows = names == source
        scored = values[rows][~np.isnan(values[rows])]
        if len(scored):
            metrics[f"train-source/{source}/score/mean"] = float(scored.mean())
        metrics[f"train-source/{source}/response_length/mean"] = float(tokens[rows].mean())
        metrics[f"train-source/{source}/count"] = float(rows.sum())
    return metrics


def _are_equal(scores: Sequence[float]) -> bool:
    """Return whether scores of whole responses differ at most by the rounding of float32."""
    return len(informative_rows(np.array(scores), np.zeros(len(scores)), np.ones(len(scores), dtype=bool))) == 0
