"""Dynamic sampling: prompts whose responses all earn the same teach nothing, so others are sampled in their place.

DAPO, https://arxiv.org/abs/2503.14476, section 3.2: a group that is all right or all wrong has no
advantage under a group baseline. It would shrink the batch that the gradient comes from, more so
the better (or worse) the policy is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from verl.errors import RewardError, RolloutError
from verl.protocol import DataProto
from verl.trainer.config import FilterGroupsConfig

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

NOTABLE_BATCHES = 10
"""Every so many batches for one step are a warning: without ``max_num_gen_batches`` a run goes on for ever."""


def informative_rows(values: np.ndarray, prompts: np.ndarray, takes_part: np.ndarray) -> np.ndarray:
    """Rows of the prompts whose responses do not all have the same value.

    >>> informative_rows(np.array([1.0, 0.0, 1.0, 1.0]), np.array(["a", "a", "b", "b"]), np.ones(4, bool))
    array([0, 1])

    Args:
        values: (bsz,) of each response.
        prompts: (bsz,) which prompt it answers.
        takes_part: (bsz,) false where a response is not trained on; such a value is not looked at.

    Returns:
        row numbers, ascending; a prompt is kept whole, such responses with it.
    """
    _, group = np.unique(prompts, return_inverse=True)
    highest = np.full(group.max(initial=-1) + 1, -np.inf)
    lowest = np.full_like(highest, np.inf)
    np.maximum.at(highest, group[takes_part], values[takes_part])
    np.minimum.at(lowest, group[takes_part], values[takes_part])
    return np.flatnonzero((highest > lowest)[group])


@dataclass(frozen=True)
class Draw:
    """One batch of generated and scored responses."""

    batch: DataProto
    prompts: np.ndarray
    """(bsz,) which prompt each row answers."""
    takes_part: np.ndarray
    """(bsz,) false where a response is not trained on: it has no score, or no token."""


def fill_batch(
    draw: Callable[[int], Draw], config: FilterGroupsConfig, num_prompts: int, n: int
) -> tuple[DataProto, Metrics]:
    """Draw batches until ``num_prompts`` informative prompts are there.

    Args:
        draw: makes the k-th batch (k = 0, 1, ...) from prompts that come next in the data.
        config: ``algorithm.filter_groups``: which value must differ, and how many batches at most.
        num_prompts: prompts of a training batch.
        n: responses per prompt.

    Returns:
        ``num_prompts * n`` rows, the first that were found; and ``training/filter_groups/...``:
        ``num_gen_batches``, ``kept_ratio`` (informative prompts of those drawn), ``surplus`` (informative
        prompts beyond the batch, which are dropped), ``{metric}/mean`` over all responses that were
        drawn and take part (that of the batch alone is biased by the choice).

    Raises:
        RolloutError: ``max_num_gen_batches`` did not suffice.
        RewardError: the reward function does not return the value that is asked for.
    """
    kept: list[DataProto] = []
    values: list[np.ndarray] = []
    drawn = found = 0
    while found < num_prompts:
        if config.max_num_gen_batches and len(values) == config.max_num_gen_batches:
            raise RolloutError(_not_enough(config, found, drawn, num_prompts, np.concatenate(values)))
        one = draw(len(values))
        value = values_of(one.batch, str(config.metric))
        rows = informative_rows(value, one.prompts, one.takes_part)
        kept.append(one.batch.select_idxs(rows.tolist()))
        values.append(value[one.takes_part])
        drawn += len(one.batch) // n
        found += len(rows) // n
        level = logging.WARNING if len(values) % NOTABLE_BATCHES == 0 else logging.INFO
        logger.log(level, "dynamic sampling: %d of %d prompts after %d batches", found, num_prompts, len(values))
    name = "training/filter_groups"
    metrics = {
        f"{name}/num_gen_batches": float(len(values)),
        f"{name}/kept_ratio": found / drawn,
        f"{name}/surplus": float(found - num_prompts),
        f"{name}/{config.metric}/mean": float(np.concatenate(values).mean()),
    }
    batch = DataProto.concat(_with_equal_columns([part for part in kept if len(part)]))
    return batch.select_idxs(list(range(num_prompts * n))), metrics


def values_of(batch: DataProto, metric: str) -> np.ndarray:
    """The value of each response that must differ inside a group, (bsz,) float64.

    ``seq_reward`` and ``seq_final_reward`` are the summed token scores, with any length penalty;
    other names are what the reward function returned (``score``, ``acc``, ...).

    Raises:
        RewardError: it returned no such value, or one that is no number.
    """
    if metric in ("seq_reward", "seq_final_reward"):
        return batch.batch["token_level_scores"].sum(-1).double().numpy()
    if metric not in batch.non_tensor_batch:
        raise RewardError(
            f"algorithm.filter_groups.metric={metric}, but the reward function returned no '{metric}' "
            f"(columns: {', '.join(sorted(batch.non_tensor_batch))}). Return it in the function's dict, or use "
            "score or seq_reward, which are always there."
        )
    column = batch.non_tensor_batch[metric]
    try:
        return np.array([np.nan if value is None else float(value) for value in column])
    except (TypeError, ValueError):
        raise RewardError(
            f"algorithm.filter_groups.metric={metric} must be a number, got {column[0]!r:.100}."
        ) from None


def _with_equal_columns(parts: Sequence[DataProto]) -> list[DataProto]:
    """A reward function may return a value for some responses only; where a batch has none of them it is None."""
    names = {name for part in parts for name in part.non_tensor_batch}
    empty = [
        {name: np.full(len(part), None, dtype=object) for name in names - part.non_tensor_batch.keys()}
        for part in parts
    ]
    return [part | DataProto.from_dict(non_tensors=columns) for part, columns in zip(parts, empty, strict=True)]


def _not_enough(config: FilterGroupsConfig, found: int, drawn: int, wanted: int, values: np.ndarray) -> str:
    mean = f"mean {config.metric}: {values.mean():.3g}" if len(values) else "no response has a score"
    return (
        f"dynamic sampling found {found} prompts whose responses differ in '{config.metric}' among {drawn}, and a "
        f"batch needs {wanted}; algorithm.filter_groups.max_num_gen_batches={config.max_num_gen_batches} is used up "
        f"({mean}). The data is too easy or too hard for this policy: change the data, "
        "raise rollout.n, data.gen_batch_size or max_num_gen_batches (0 never gives up), or lower "
        "data.train_batch_size."
    )
