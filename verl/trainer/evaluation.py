"""Score stored responses: the mean score of each data source.

Reads the output of ``main_generation``, or any parquet, json or jsonl file with a column of responses, a list per row
(``data.response_key``), and those that the scorer reads: ``data.data_source_key`` and ``data.reward_model_key``, or the
columns that a function of the user's own names.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from verl.base.import_utils import load_object
from verl.config import EvalConfig, local_copies
from verl.datasets.files import DataFile, open_files, require_columns
from verl.datasets.rl_dataset import UNKNOWN_SOURCE
from verl.datasets.row_conversation import row_messages
from verl.errors import ConfigError, DataError, RewardError
from verl.scorers import UnknownDataSourceError, check_truth, default_compute_score, row_truth
from verl.workers.reward_manager.function import RewardFunction, RewardSample, RowParameters
from verl.workers.reward_manager.naive import RUN_COLUMNS
from verl.workers.reward_manager.scores import Score

logger = logging.getLogger(__name__)

_SCORED_COLUMNS = ("response_key", "data_source_key", "reward_model_key")
"""Keys of the columns that verl's scorers read."""


def evaluate(config: EvalConfig) -> dict[str, float]:
    """Score every response of the file; see :func:`score_responses`.

    Returns:
        for each data source ``test_score/<source>``, the mean over prompts of the mean score of their responses, and,
        where prompts have several responses, ``test_score_best/<source>``, the mean over prompts of the best score;
        ``test_score_std_err/<source>``, the standard error of ``test_score`` over prompts (of two prompts or more);
        ``test_<name>/<source>`` for every other number that the reward function returned, averaged likewise;
        ``prompts/<source>`` and ``responses/<source>``, how many there are, scored or not;
        ``reward/error_rate``, the share of responses that could not be scored and are excluded from the means.

    Raises:
        RewardError: no response could be scored; with the first traceback.
    """
    return summarize(score_responses(config))


def score_responses(
    config: EvalConfig, notify: Callable[[int, int], None] = lambda done, total: None
) -> list[tuple[str, list[Score]]]:
    """Score every response of the file.

    Args:
        config: the configuration of ``main_eval``.
        notify: called about ten times with the number of responses that are scored, of all.

    Returns:
        for each prompt its data source and the scores of its responses.

    Raises:
        DataError: the file lacks a column, or a row has no responses.
    """
    files = open_files(local_copies(config).data.path or "", "data.path")
    # A function of the user's own names the columns that it reads.
    names = ("response_key",) if config.custom_reward_function.path else _SCORED_COLUMNS
    require_columns(files, {config.data[name]: f"data.{name}" for name in names})
    function = _reward_function(config)
    for file in files:
        function.row_parameters.check([*file.columns, *RUN_COLUMNS])
    groups = [group for file in files for group in _samples_of(file, config, function.row_parameters)]
    samples = [sample for group in groups for sample in group]
    columns = list(dict.fromkeys(name for file in files for name in file.columns))
    function.row_parameters.check_truths([sample.ground_truth for sample in samples], columns)
    computed: list[Score] = []
    size = max(64, -(-len(samples) // 10))
    for start in range(0, len(samples), size):
        computed += function.score_samples(samples[start : start + size])
        notify(len(computed), len(samples))
    scores = iter(computed)
    return [(group[0].data_source, [next(scores) for _ in group]) for group in groups]


def _reward_function(config: EvalConfig) -> RewardFunction:
    custom = config.custom_reward_function
    if not custom.path:
        return RewardFunction(default_compute_score, {})
    function = RewardFunction(
        load_object(custom.path, custom.name, "custom_reward_function.path", "custom_reward_function.name"),
        custom.reward_kwargs,
    )
    if function.form == "batch":
        raise ConfigError(
            f"custom_reward_function.name='{custom.name}' scores batches of tensors, and main_eval has texts. Give a "
            "function (data_source, solution_str, ground_truth, extra_info, **kwargs) -> float."
        )
    return function


def _samples_of(file: DataFile, config: EvalConfig, parameters: RowParameters) -> Iterator[list[RewardSample]]:
    for index in range(len(file)):
        row, where = file.row(index), f"{file.path}, row {index}"
        responses = row[config.data.response_key]
        if isinstance(responses, str) or not isinstance(responses, Sequence) or len(responses) == 0:
            raise DataError(
                f"{where}: column '{config.data.response_key}' is {responses!r:.80}. Expected a "
                "list of at least one response, as main_generation writes it (data.response_key)."
            )
        truth = row_truth(row.get(config.data.reward_model_key), row.get("ground_truth"))
        source, extra = str(row.get(config.data.data_source_key, UNKNOWN_SOURCE)), row.get("extra_info") or {}
        if not isinstance(extra, dict):
            raise DataError(f"{where}: extra_info is {extra!r:.80}, not a mapping.")
        if not config.custom_reward_function.path:
            _check_truth(source, truth, where)
        columns = dict.fromkeys(file.columns) | row | {"uid": str(index), "index": extra.get("index", index)}
        if {"prompt", "raw_prompt"} & {*parameters.required, *parameters.optional}:
            columns |= dict.fromkeys(("prompt", "raw_prompt"), row_messages(row.get(config.data.prompt_key), where))
        yield [RewardSample(source, text, truth, extra, uid=str(index), columns=columns) for text in responses]


def _check_truth(source: str, truth: object, where: str) -> None:
    try:
        check_truth(source, truth)
    except UnknownDataSourceError:
        raise
    except RewardError as error:
        raise DataError(f"{where}: the scorer of '{source}' cannot read the ground truth: {error}") from error


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
    metrics: dict[str, float] = {}
    for source in sorted({source for source, _ in groups}):
        source_scores = [scores for other, scores in groups if other == source]
        scored = [valid for scores in source_scores if (valid := [score for score in scores if score.error is None])]
        if scored:
            means = [_mean([score.value for score in scores]) for scores in scored]
            metrics[f"test_score/{source}"] = _mean(means)
            if any(len(scores) > 1 for scores in scored):
                metrics[f"test_score_best/{source}"] = _mean(
                    [max(score.value for score in scores) for scores in scored]
                )
            if len(means) > 1:
                metrics[f"test_score_std_err/{source}"] = statistics.stdev(means) / math.sqrt(len(means))
            for name, values in _other_numbers(scored).items():
                metrics[f"test_{name}/{source}"] = _mean([_mean(values_of_prompt) for values_of_prompt in values])
        metrics[f"prompts/{source}"] = len(source_scores)
        metrics[f"responses/{source}"] = sum(map(len, source_scores))
    return metrics | {"reward/error_rate": len(failed) / total}


def _other_numbers(scored: Sequence[Sequence[Score]]) -> dict[str, list[list[float]]]:
    """Return name → values by prompt, of the numbers beside the score; a prompt without the name is left out."""
    by_name: dict[str, list[list[float]]] = {}
    for scores in scored:
        prompt_values: dict[str, list[float]] = {}
        for score in scores:
            for name, value in score.extra.items():
                if name != "score" and isinstance(value, (bool, int, float)) and math.isfinite(value):
                    prompt_values.setdefault(name, []).append(float(value))
        for name, values in prompt_values.items():
            by_name.setdefault(name, []).append(values)
    return by_name


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
