"""``verl.generate`` and ``verl.evaluate``."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.api.data import Rows, as_rows, read_jsonl, write_jsonl, write_prompts
from verl.api.objects import write_rewards
from verl.api.result import TrainingResult, path_of
from verl.api.settings import checked_config, keys_of_call, placement, prompt_length, settings_of
from verl.base.types import JsonMapping, JsonObject
from verl.config import EvalConfig, GenerationConfig
from verl.datasets.files import SUFFIXES
from verl.errors import DataError, RewardError
from verl.utils.console import restart_clock

if TYPE_CHECKING:
    from verl.workers.reward_manager.scores import Score

RESPONSES = "responses"
SCORES = "scores"


def generate(
    model: str | Path | TrainingResult,
    prompts: Rows,
    n: int = 1,
    *,
    ray: bool = False,
    settings: Mapping[str, object] | None = None,
    **more_settings: object,
) -> list[JsonObject]:
    """Sample responses, as ``verl generate`` does, from the model's own distribution unless settings say otherwise.

    Args:
        model: a folder with a model, a GGUF file, a name on the Hugging Face hub, or the result of a training call.
        prompts: a list of texts or of conversations (lists of messages), or rows as in :func:`verl.train`.
        n: responses to each prompt.
        ray: run the ranks as processes of Ray, one for each GPU, instead of one rank in this process.
        settings: settings of ``verl generate`` by key, such as ``{"rollout.temperature": 0.7}``.
        more_settings: settings by key, by the end of a key, or by their names in TRL and OpenRLHF.

    Returns:
        the rows, each with a list ``responses`` of ``n`` texts.

    Raises:
        ConfigError: lists all problems of the settings, before the model loads.
        DataError: the prompts cannot be used.
    """
    values = keys_of_call(settings_of(settings, more_settings), GenerationConfig)
    with tempfile.TemporaryDirectory(prefix="verl-generate-") as folder:
        return _generate(model, rows_of_prompts(prompts), n, ray, values, Path(folder))


def rows_of_prompts(prompts: Rows) -> list[JsonObject]:
    """Return prompts as rows: texts and conversations become the column ``prompt``."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, str) and len(prompts):
        if all(isinstance(prompt, str) for prompt in prompts) or all(
            isinstance(prompt, (list, tuple)) for prompt in prompts
        ):
            return [{"prompt": prompt} for prompt in prompts]
        if all(isinstance(prompt, Mapping) and {"role", "content"} <= set(prompt) for prompt in prompts):
            raise DataError("prompts is one conversation. Give a list of them: [[{'role': ..., 'content': ...}]].")
    if isinstance(prompts, str) and not prompts.endswith(SUFFIXES):
        raise DataError(f"prompts={prompts!r:.60} is one text. Give a list of them, or the path of a file of rows.")
    return as_rows(prompts, "prompts")


def _generate(
    model: str | Path | TrainingResult,
    rows: list[JsonObject],
    n: int,
    ray: bool,
    values: JsonMapping,
    folder: Path,
) -> list[JsonObject]:
    files = write_prompts(rows, folder / "prompts.jsonl", values.get("data.prompt_key", "prompt"), "prompts")
    output = folder / "responses.jsonl"
    defaults = placement(ray) | {
        "model.path": path_of(model),
        "data.path": files.paths[0],
        "data.output_path": str(output),
        "data.n_samples": n,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "rollout.top_k": -1,
    }
    defaults |= prompt_length(
        path_of(model), "rollout.prompt_length", "rollout.response_length", values, GenerationConfig
    )
    config = checked_config(defaults, values, GenerationConfig)

    from verl.trainer.main_generation import run_generation

    restart_clock()
    run_generation(config)
    responses = [row[RESPONSES] for row in read_jsonl(output)]
    return [{**row, RESPONSES: texts} for row, texts in zip(rows, responses, strict=True)]


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model's responses.

    Attributes:
        rows: the rows, each with its ``responses`` and their ``scores``; None where a response could not be scored.
        prompts: prompts with at least one scored response.
        responses: responses, the failed ones too.
        failed: responses that could not be scored; they are in no mean.
        mean: mean over prompts of the mean score of their responses.
        standard_error: of that mean, from the deviation between prompts; None of a single prompt.
        best: mean over prompts of their best score.
        parts: the same three numbers of each further value that the reward functions returned, by name.
        sources: mean and standard error of each data source, by name, where rows have several.
    """

    rows: list[JsonObject] = field(repr=False)
    prompts: int
    responses: int
    failed: int
    mean: float
    standard_error: float | None
    best: float
    parts: dict[str, Mean] = field(default_factory=dict)
    sources: dict[str, Mean] = field(default_factory=dict)


@dataclass(frozen=True)
class Mean:
    """A mean over prompts, its standard error (None of a single prompt), and the number of prompts."""

    mean: float
    standard_error: float | None
    prompts: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Mean:
        """Compute mean and standard error s / √n of values, with the deviation s of a sample.

        >>> Mean.from_values([0.0, 1.0, 1.0, 0.0])
        Mean(mean=0.5, standard_error=0.28867513459481287, prompts=4)
        """
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), error, len(values))


def evaluate(
    model: str | Path | TrainingResult,
    data: Rows,
    reward: Any = None,
    n: int = 1,
    *,
    reward_weights: Sequence[float] | None = None,
    ray: bool = False,
    settings: JsonMapping | None = None,
    **more_settings: object,
) -> Evaluation:
    """Sample responses and score them.

    The arguments are those of :func:`verl.train` and :func:`generate`. A response that cannot be scored is counted and
    left out of the means.

    Raises:
        RewardError: no response could be scored; with the first reason.
    """
    values = keys_of_call(settings_of(settings, more_settings), GenerationConfig)
    rows = as_rows(data, "data")
    prompt_key = values.get("data.prompt_key", "prompt")
    with tempfile.TemporaryDirectory(prefix="verl-evaluate-") as name:
        folder = Path(name)
        files = write_prompts(rows, folder / "rows.jsonl", prompt_key, "data")
        reward_settings = write_rewards(reward, reward_weights, files, folder)
        answered = _generate(model, rows, n, ray, values, folder)
        lines = [
            {"data_source": "unknown", "reward_model": None, **line, RESPONSES: row[RESPONSES]}
            for line, row in zip(read_jsonl(Path(files.paths[0])), answered, strict=True)
        ]
        write_jsonl(lines, folder / "scored.jsonl", "data")
        config = checked_config({"data.path": str(folder / "scored.jsonl"), **reward_settings}, {}, EvalConfig)

        from verl.trainer.evaluation import score_responses

        groups = score_responses(config)
    return summary(answered, groups)


def summary(rows: Sequence[JsonObject], groups: Sequence[tuple[str, Sequence[Score]]]) -> Evaluation:
    """Compute the numbers of :class:`Evaluation` from rows with responses and the scores of each.

    Raises:
        RewardError: no response could be scored.
    """
    scores = [score for _, group in groups for score in group]
    errors = [score.error for score in scores if score.status != "ok"]
    if len(errors) == len(scores):
        raise RewardError(f"none of the {len(scores)} responses could be scored. The first reason:\n{errors[0]}")
    usable = [(source, [score for score in group if score.status == "ok"]) for source, group in groups]
    usable = [(source, group) for source, group in usable if group]
    means = [statistics.fmean(score.value for score in group) for _, group in usable]
    names = dict.fromkeys(name for _, group in usable for score in group for name in score.extra)
    parts = {name: [_numbers(group, name) for _, group in usable] for name in names}
    by_source: dict[str, list[float]] = {}
    for (source, _), mean in zip(usable, means, strict=True):
        by_source.setdefault(source, []).append(mean)
    overall = Mean.from_values(means)
    return Evaluation(
        rows=[
            {**row, SCORES: [score.value if score.status == "ok" else None for score in group]}
            for row, (_, group) in zip(rows, groups, strict=True)
        ],
        prompts=len(usable),
        responses=len(scores),
        failed=len(errors),
        mean=overall.mean,
        standard_error=overall.standard_error,
        best=statistics.fmean(max(score.value for score in group) for _, group in usable),
        parts={
            name: Mean.from_values(
                [statistics.fmean(scores_of_prompt) for scores_of_prompt in values if scores_of_prompt]
            )
            for name, values in parts.items()
            if any(values)
        },
        sources={source: Mean.from_values(values) for source, values in by_source.items()}
        if len(by_source) > 1
        else {},
    )


def _numbers(group: Sequence[Score], name: str) -> list[float]:
    values = [score.extra.get(name) for score in group]
    return [float(value) for value in values if isinstance(value, (bool, int, float))]
