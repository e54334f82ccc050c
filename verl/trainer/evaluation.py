"""Score stored responses: the mean score of each data source.

Reads the output of ``main_generation``, or any parquet, json or jsonl file with the columns that ``data.response_key``
(a list of responses), ``data.data_source_key`` and ``data.reward_model_key`` name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from verl.base.import_utils import load_object
from verl.config import EvalConfig, local_copies
from verl.errors import ConfigError, DataError, RewardError
from verl.utils.dataset.files import DataFile, open_files, require_columns
from verl.utils.reward_score import UnknownDataSourceError, check_truth, default_compute_score
from verl.workers.reward_manager.function import RewardFunction, RewardSample
from verl.workers.reward_manager.scores import Score

logger = logging.getLogger(__name__)


def evaluate(config: EvalConfig) -> dict[str, float]:
    """Score every response of the file; see :func:`score_responses`.

    Returns:
        for each data source ``test_score/<source>``, the mean over prompts of the mean score of their responses, and,
        where prompts have several responses, ``test_score_best/<source>``, the mean over prompts of the best score;
        ``reward/error_rate``, the share of responses that could not be scored and are excluded from the means.

    Raises:
        RewardError: no response could be scored; with the first traceback.
    """
    return summarize(score_responses(config))


def score_responses(config: EvalConfig) -> list[tuple[str, list[Score]]]:
    """Score every response of the file.

    Returns:
        for each prompt its data source and the scores of its responses.

    Raises:
        DataError: the file lacks a column, or a row has no responses.
    """
    files = open_files(local_copies(config).data.path or "", "data.path")
    keys = {"response_key": config.data.response_key, "data_source_key": config.data.data_source_key}
    keys["reward_model_key"] = config.data.reward_model_key
    require_columns(files, {column: f"data.{key}" for key, column in keys.items()})
    groups = [group for file in files for group in _samples_of(file, config)]
    scores = iter(_reward_function(config).score_samples([sample for group in groups for sample in group]))
    return [(group[0].data_source, [next(scores) for _ in group]) for group in groups]


def _reward_function(config: EvalConfig) -> RewardFunction:
    custom = config.custom_reward_function
    if not custom.path:
        return RewardFunction(default_compute_score, {})
    function = RewardFunction(load_object(custom.path, custom.name, "custom_reward_function"), custom.reward_kwargs)
    if function.form == "batch":
        raise ConfigError(
            f"custom_reward_function.name='{custom.name}' scores batches of tensors, and main_eval has texts. Give a "
            "function (data_source, solution_str, ground_truth, extra_info, **kwargs) -> float."
        )
    return function


def _samples_of(file: DataFile, config: EvalConfig) -> Iterator[list[RewardSample]]:
    for number in range(len(file)):
        row = file.row(number)
        responses = row[config.data.response_key]
        if isinstance(responses, str) or not isinstance(responses, Sequence) or len(responses) == 0:
            raise DataError(
                f"{file.path}, row {number}: column '{config.data.response_key}' is {responses!r:.80}. Expected a "
                "list of at least one response, as main_generation writes it (data.response_key)."
            )
        truth = (row.get(config.data.reward_model_key) or {}).get("ground_truth")
        source, extra = str(row[config.data.data_source_key]), row.get("extra_info") or {}
        if not config.custom_reward_function.path:
            _check_truth(source, truth, f"{file.path}, row {number}")
        yield [RewardSample(source, text, truth, extra, uid=str(number), columns=row) for text in responses]


def _check_truth(source: str, truth: Any, place: str) -> None:
    try:
        check_truth(source, truth)
    except UnknownDataSourceError:
        raise
    except RewardError as error:
        raise DataError(f"{place}: the scorer of '{source}' cannot read the ground truth: {error}") from error


def summarize(groups: Sequence[tuple[str, list[Score]]]) -> dict[str, float]:
    """Compute the metrics of :func:`evaluate` from each prompt's data source and the scores of its responses."""
    failed = [score for _, scores in groups for score in scores if score.error is not None]
    total = sum(len(scores) for _, scores in groups)
    if len(failed) == total:
        raise RewardError(f"none of the {total} responses could be scored. The first error:\n{failed[0].error}")
    if failed:
        logger.warning(
            "%d of %d responses could not be scored. The first error:\n%s", len(failed), total, failed[0].error
        )
    by_source: dict[str, list[list[float]]] = {}
    for source, scores in groups:
        values = [score.value for score in scores if score.error is None]
        if values:
            by_source.setdefault(source, []).append(values)
    metrics: dict[str, float] = {}
    for source, prompts in sorted(by_source.items()):
        metrics[f"test_score/{source}"] = _mean([_mean(values) for values in prompts])
        if any(len(values) > 1 for values in prompts):
            metrics[f"test_score_best/{source}"] = _mean([max(values) for values in prompts])
    return metrics | {"reward/error_rate": len(failed) / total}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
