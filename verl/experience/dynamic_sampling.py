"""Dynamic sampling: replace prompts whose responses all have the same reward.

DAPO, https://arxiv.org/abs/2503.14476, section 3.2: if all responses of a group are right, or all wrong, their
advantages under a group baseline are 0. Such groups reduce the effective batch size, and become more frequent as the
policy gets better.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from verl.algorithms.groups import rounding_unit
from verl.config import FilterGroupsConfig
from verl.errors import RewardError, RolloutError
from verl.experience.sequences import Trajectories, trajectory_scores
from verl.protocol import DataProto
from verl.utils.metric import Metrics, number_or_nan
from verl.workers.rollout.columns import joined_rows

logger = logging.getLogger(__name__)


FLOAT32 = rounding_unit(torch.float32)
PREFIX = "training/filter_groups"
NOTABLE_BATCHES = 10
"""Log a warning after every 10 batches drawn for one step: without ``max_num_gen_batches`` there is no limit."""


def informative_rows(
    values: np.ndarray, prompts: np.ndarray, takes_part: np.ndarray, rounding: np.ndarray | None = None
) -> np.ndarray:
    """Select the rows of prompts whose responses differ in value, by more than rounding.

    >>> informative_rows(np.array([1.0, 0.0, 1.0, 1.0]), np.array(["a", "a", "b", "b"]), np.ones(4, bool))
    array([0, 1])

    Args:
        values: (bsz,) value of each response.
        prompts: (bsz,) id of its prompt.
        takes_part: (bsz,) false where a response is not trained on; its value is ignored, as is NaN, a missing value.
        rounding: (bsz,) bound of what rounding may have changed in each value; by default that of one float32.

    Returns:
        row numbers, ascending; all rows of a selected prompt, including those that do not take part.
    """
    _, group = np.unique(prompts, return_inverse=True)
    rounding = FLOAT32 * np.abs(values) if rounding is None else rounding
    counts = takes_part & ~np.isnan(values)
    highest = np.full(group.max(initial=-1) + 1, -np.inf)
    lowest = np.full_like(highest, np.inf)
    np.maximum.at(highest, group[counts], (values - rounding)[counts])
    np.minimum.at(lowest, group[counts], (values + rounding)[counts])
    return np.flatnonzero((highest > lowest)[group])


@dataclass(frozen=True)
class Draw:
    """One batch of generated and scored responses."""

    batch: DataProto
    prompts: np.ndarray
    """(bsz,) id of each row's prompt."""
    takes_part: np.ndarray
    """(bsz,) false where a response is not trained on, because it has no score or no token."""


@dataclass(frozen=True)
class Judged:
    """Result of judging which prompts of scored responses are informative."""

    is_kept: np.ndarray
    """(bsz,) bool, True where the row's prompt is informative."""
    values: np.ndarray
    """The metric of each response that has one and takes part."""
    num_prompts: int
    num_kept: int
    """Informative prompts."""


def judged(draw: Draw, metric: str, n: int) -> Judged:
    """Judge which prompts of scored responses are informative.

    Args:
        draw: the responses.
        metric: ``algorithm.filter_groups.metric``.
        n: responses per prompt.

    Raises:
        RewardError: the reward function does not return the metric.
    """
    value, rounding = values_of(draw.batch, metric)
    scored = Trajectories.from_batch(draw.batch).scored_rows
    rows = informative_rows(value[scored], draw.prompts[scored], draw.takes_part[scored], rounding[scored])
    is_kept = np.isin(draw.prompts.astype(str), draw.prompts[scored][rows].astype(str))
    has_value = draw.takes_part[scored] & ~np.isnan(value[scored])
    return Judged(is_kept, value[scored][has_value], len(scored) // n, len(rows) // n)


def fill_batch(
    draws: Iterator[Draw], config: FilterGroupsConfig, num_prompts: int, n: int
) -> tuple[DataProto, Metrics]:
    """Draw batches until they hold ``num_prompts`` informative prompts.

    Args:
        draws: scored batches of the next prompts in the data.
        config: ``algorithm.filter_groups``.
        num_prompts: prompts of a training batch.
        n: responses per prompt.

    Returns:
        the rows of the first ``num_prompts`` informative prompts; and metrics ``training/filter_groups/...``:
        ``num_gen_batches``, ``kept_ratio`` (share of informative prompts), ``surplus`` (informative prompts beyond
        the batch, which are dropped), ``{metric}/mean`` over all drawn responses that take part (the mean over the
        selected rows would be biased).

    Raises:
        RolloutError: ``max_num_gen_batches`` batches were not enough.
        RewardError: the reward function does not return the configured metric.
    """
    kept_parts: list[DataProto] = []
    prompts: list[object] = []
    values: list[np.ndarray] = []
    num_drawn = num_kept = 0
    while num_kept < num_prompts:
        if config.max_num_gen_batches and len(values) == config.max_num_gen_batches:
            raise RolloutError(too_few_message(config, num_kept, num_drawn, num_prompts, np.concatenate(values)))
        draw = next(draws)
        outcome = judged(draw, str(config.metric), n)
        kept_parts.append(draw.batch.select_idxs(np.flatnonzero(outcome.is_kept).tolist()))
        prompts += draw.prompts[outcome.is_kept].tolist()
        values.append(outcome.values)
        num_drawn += outcome.num_prompts
        num_kept += outcome.num_kept
        level = logging.WARNING if len(values) % NOTABLE_BATCHES == 0 else logging.INFO
        logger.log(level, "dynamic sampling: %d of %d prompts after %d batches", num_kept, num_prompts, len(values))
    name = PREFIX
    metrics = {
        f"{name}/num_gen_batches": float(len(values)),
        f"{name}/kept_ratio": num_kept / num_drawn,
        f"{name}/surplus": float(num_kept - num_prompts),
        f"{name}/{config.metric}/mean": float(np.concatenate(values).mean()),
    }
    batch = joined_rows([part for part in kept_parts if len(part)])
    first = set(list(dict.fromkeys(prompts))[:num_prompts])
    return batch.select_idxs([row for row, prompt in enumerate(prompts) if prompt in first]), metrics


def values_of(batch: DataProto, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the value that must differ inside a group for each response; NaN for one that is None or not finite.

    ``reward``, ``seq_reward`` and ``seq_final_reward`` are the sum of a trajectory's token scores, including a length
    penalty; other names are values returned by the reward function (``score``, ``acc``, ...).

    Returns:
        the values, and the bound of what rounding may have changed in each; (bsz,) float64 both.

    Raises:
        RewardError: the reward function returned no such value, or one that is not a number.
    """
    if metric in ("reward", "seq_reward", "seq_final_reward"):
        token_scores = batch.batch["token_level_scores"].double()
        row_trajectories = Trajectories.from_batch(batch).indices
        scores, magnitudes = (
            trajectory_scores(batch, each).numpy()[row_trajectories] for each in (token_scores, token_scores.abs())
        )
        return scores, FLOAT32 * magnitudes
    if metric not in batch.non_tensor_batch:
        raise RewardError(
            f"algorithm.filter_groups.metric={metric}, but the reward function returned no '{metric}' "
            f"(columns: {', '.join(sorted(batch.non_tensor_batch))}). Return it in the function's dict, or use "
            "score or seq_reward, which are always there."
        )
    column = batch.non_tensor_batch[metric]
    try:
        values = np.array(list(map(number_or_nan, column)))
        return values, FLOAT32 * np.abs(values)
    except (TypeError, ValueError):
        raise RewardError(
            f"algorithm.filter_groups.metric={metric} must be a number, got {column[0]!r:.100}."
        ) from None


def too_few_message(
    config: FilterGroupsConfig, num_kept: int, num_drawn: int, num_needed: int, values: np.ndarray
) -> str:
    """Say that ``max_num_gen_batches`` is used up: ``num_kept`` of ``num_drawn`` prompts are informative."""
    mean = f"mean {config.metric}: {values.mean():.3g}" if len(values) else "no response has a score"
    return (
        f"dynamic sampling found {num_kept} prompts whose responses differ in '{config.metric}' among {num_drawn}, and "
        f"a batch needs {num_needed}; algorithm.filter_groups.max_num_gen_batches={config.max_num_gen_batches} is "
        f"used up ({mean}). The data is too easy or too hard for this policy: change the data, "
        "raise rollout.n, data.gen_batch_size or max_num_gen_batches (0 never gives up), or lower "
        "data.train_batch_size."
    )
