"""Score texts with a reward function outside a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from verl.scorers import default_compute_score, scorer_for_all
from verl.supervision.killable_pool import Budget, KillablePool
from verl.workers.reward_manager.scores import score_of

TIMEOUT_S = 300.0
"""Seconds for one text."""


async def parallel_compute_score_async(
    evaluation_func: Callable[..., object],
    completions: Sequence[str],
    references: Sequence[object],
    tasks: Sequence[str],
    extra_info: Sequence[Mapping[str, object] | None] | None = None,
    num_processes: int = 64,
) -> list[float]:
    """Score texts with ``evaluation_func(task, completion, reference, extra_info)``, each in a killable process.

    Args:
        evaluation_func: returns a number, or a dict with ``score``.
        completions: the responses.
        references: the ground truth of each response.
        tasks: the data source of each response.
        extra_info: further information about each response.
        num_processes: processes at most.

    Returns:
        the scores; 0 for a response whose call failed or took more than :data:`TIMEOUT_S` seconds.

    Raises:
        ValueError: the lists differ in length.
    """
    extras = [None] * len(completions) if extra_info is None else extra_info
    rows = zip(tasks, completions, references, extras, strict=True)
    calls = [{"function": evaluation_func, "arguments": row} for row in rows]
    pool = KillablePool(_call, max(1, min(num_processes, len(calls))), Budget(TIMEOUT_S))
    try:
        results = await asyncio.wrap_future(pool.submit(calls))
    finally:
        pool.close()
    scores = map(score_of, results)
    return [0.0 if score.error is not None else score.value for score in scores]


def _call(function: Callable[..., object], arguments: Sequence[object]) -> object:
    result = function(*arguments)
    return result[0] if isinstance(result, tuple) else result


def get_default_compute_score(reward_name: str | None = None) -> Callable[..., object]:
    """Return the reward function that scores each row by its data source, or all rows as of one source.

    Args:
        reward_name: a data source, such as ``openai/gsm8k``; None takes that of each row.

    Raises:
        UnknownDataSourceError: the source has no scorer.
    """
    if reward_name is None:
        return default_compute_score
    scorer = scorer_for_all(reward_name)

    def score(
        data_source: str, solution_str: str, ground_truth: object, extra_info: object = None, **kwargs: object
    ) -> object:
        return scorer(data_source, solution_str, ground_truth, extra_info, **kwargs)

    return score
