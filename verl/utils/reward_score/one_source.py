"""One scorer for all rows, whatever their data source: ``reward_model.reward_format``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl.utils.reward_score import default_compute_score, is_async


def scorer_for_all(source: str) -> Callable[..., Any]:
    """A reward function that scores every row as if it came from ``source``.

    Raises:
        UnknownDataSourceError: it has no scorer.
    """
    return functools.partial(_score_side_by_side if is_async(source) else _score, source)


def source_of(function: Callable[..., Any]) -> str | None:
    """The ``source`` of a function made by :func:`scorer_for_all`; None for any other function."""
    if isinstance(function, functools.partial) and function.func in (_score, _score_side_by_side):
        return str(function.args[0])
    return None


def _score(
    source: str, /, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **kwargs: Any
) -> Any:
    return default_compute_score(source, solution_str, ground_truth, extra_info, **kwargs)


async def _score_side_by_side(
    source: str, /, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **kwargs: Any
) -> Any:
    return await default_compute_score(source, solution_str, ground_truth, extra_info, **kwargs)
