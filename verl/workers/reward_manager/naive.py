"""Reward managers that decode responses, call a reward function, and put the score on the last token.

``naive`` and ``batch`` take every form of reward function; ``prime`` and ``gdpo`` only some.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.base.repeats import without_repeated_traceback
from verl.datasets.rl_dataset import RLHFDataset
from verl.errors import ConfigError, DataError, RewardError
from verl.protocol import DataProto, compute_response_mask
from verl.schema import require
from verl.scorers import (
    UnknownDataSourceError,
    check_settings,
    check_truth,
    default_compute_score,
    row_truth,
    source_of,
)
from verl.scorers.registry import UnusableTestsError
from verl.supervision.killable_pool import Budget, RateLimit, unwrapped
from verl.utils.deferred import Deferred
from verl.workers.reward_manager.abstract import (
    AbstractRewardManager,
    Result,
    RewardTensor,
    register,
    single_score,
)
from verl.workers.reward_manager.function import Form, RewardFunction, RewardSample, tensors_of
from verl.workers.reward_manager.scores import Score, Scores, extra_info, place_scores, token_scores
from verl.workers.reward_manager.texts import ResponseTexts, response_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

RUN_COLUMNS = ("prompt", "raw_prompt", "uid", "index")
"""Columns that a run adds to those of the data, for functions that name them; ``prompt`` has the messages."""


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Scores responses with a reward function.

    The function runs in killable processes (:class:`~verl.supervision.killable_pool.KillablePool`), each call with
    limits of time and memory. A sample that cannot be scored gets score 0 and a ``reward_status`` other than ``ok``;
    the counts and the first reason are logged. If more than ``max_error_rate`` of a batch fail, scoring raises.

    If the batch has ``rm_scores`` of a reward model, these are the scores, unless a custom function or
    ``reward_model.reward_format`` is set; such a function gets the model's score as ``extra_info["rm_score"]``.

    Arguments not listed here are those of :class:`AbstractRewardManager`.

    Args:
        compute_score: a function of one of the forms of :mod:`verl.workers.reward_manager.function`;
            default: the scorer of each data source, :func:`verl.scorers.default_compute_score`.
        max_error_rate: largest fraction of a batch that may fail.
        max_concurrent: concurrent calls over all processes.
        num_workers: processes that score.
        timeout_s: timeout of a sample.
        memory_limit_mb: MiB for a sample, beyond what loading the function took; None is no limit.
        batch_timeout_s: timeout of a call that scores a whole batch; None is ten times ``timeout_s``.
        kill_retries: how often a sample is scored again after its process was killed from outside; then its status
            is ``killed``. Samples that fail or exceed a limit themselves are not scored again.
        scorer_kwargs: further arguments of the reward function.

    Raises:
        ConfigError: the function has none of the forms that the manager takes.
    """

    forms: tuple[Form, ...] = ("sample", "texts", "batch")
    """Forms of reward function that the manager takes."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., object] | None = None,
        reward_fn_key: str = "data_source",
        max_error_rate: float = 0.5,
        max_concurrent: int = 64,
        num_workers: int = 1,
        timeout_s: float = 30.0,
        memory_limit_mb: int | None = 4096,
        batch_timeout_s: float | None = None,
        kill_retries: int = Budget.kill_retries,
        **scorer_kwargs: object,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.reward_fn_key = reward_fn_key
        self.max_error_rate = max_error_rate
        function = self.compute_score = compute_score or default_compute_score
        self.settings = {**getattr(function, "keywords", {}), **scorer_kwargs}
        self.has_rule = unwrapped(function) is not default_compute_score
        self.format = source_of(function)
        self.function = RewardFunction(
            function,
            scorer_kwargs,
            max_concurrent=max_concurrent,
            num_workers=num_workers,
            budget=Budget(timeout_s, memory_limit_mb, kill_retries=kill_retries),
            batch_timeout_s=batch_timeout_s,
            limits=self.limits(),
        )
        if self.function.form not in self.forms:
            raise ConfigError(
                f"{type(self).__name__} takes reward functions of the form {' or '.join(self.forms)}, and this one has "
                f"the form '{self.function.form}' (see verl.workers.reward_manager.function). "
                "The reward manager naive takes all forms."
            )

    def limits(self) -> Sequence[RateLimit]:
        """Rate limits over all calls of the function; a hook for subclasses."""
        return ()

    def tokens(self, samples: Sequence[RewardSample]) -> Sequence[float] | None:
        """Cost of each call under a limit of tokens; a hook for subclasses."""
        return None

    def check_dataset(self, dataset: RLHFDataset) -> None:
        """Check columns, styles, settings and ground truths.

        A custom function may need none of them; ``reward_format`` only the ground truths that its scorer compares with.
        """
        if self.has_rule:
            self._check_row_parameters(dataset)
            if self.format is not None:
                _check_truths(dataset, self.format)
            return
        dataset.require_columns(
            {
                self.reward_fn_key: "reward_fn_key",
                "reward_model": "scorers compare with its ground_truth",
            }
        )
        styles = [isinstance(value, dict) and value.get("style") for value in dataset.source_column("reward_model")]
        if "model" in styles:
            raise DataError(
                f"{dataset.place(styles.index('model'))}: reward_model.style is 'model' ({styles.count('model')} of "
                f"{len(styles)} rows), and the run has no model that scores. Set reward_model.enable=true with "
                "reward_model.model.path, or reward_format=llm_judge; or write style 'rule' for rows that "
                "the scorer of their data source is to judge."
            )
        for source in dict.fromkeys(map(str, dataset.source_column(self.reward_fn_key))):
            check_settings(self.settings, source)
        truths = enumerate(map(row_truth, dataset.source_column("reward_model")))
        if lacking := [item for item, truth in truths if truth is None]:
            raise DataError(
                f"{len(lacking)} of {len(dataset)} rows have no reward_model.ground_truth, with which the scorer "
                f"compares the response; the first is {dataset.place(lacking[0])}. Give it a value, leave such rows "
                "out, or use your own scorer (custom_reward_function.path)."
            )
        _check_truths(dataset, reward_fn_key=self.reward_fn_key)

    def _check_row_parameters(self, dataset: RLHFDataset) -> None:
        """Check that a function of the user's own gets what its parameters ask of the rows."""
        parameters = self.function.row_parameters
        parameters.check([*(name for name in dataset.columns if name not in dataset.images.keys), *RUN_COLUMNS])
        for name in parameters.required:
            if name in dataset.columns:
                self._refuse_empty(dataset, name)
        columns = zip(dataset.source_column("reward_model"), dataset.source_column("ground_truth"), strict=True)
        truths = [row_truth(*values) for values in columns]
        parameters.check_truths(truths, dataset.columns)
        empty = [item for item, truth in enumerate(truths) if truth is None]
        if parameters.needs_truth and empty:
            logger.warning(
                "%d of %d rows have no ground truth; the first is %s. The reward function %s gets None for them.",
                len(empty), len(dataset), dataset.place(empty[0]), parameters.shown,
            )  # fmt: skip

    def _refuse_empty(self, dataset: RLHFDataset, name: str) -> None:
        """Refuse rows without a value of a column that the function needs."""
        if empty := [item for item, value in enumerate(dataset.source_column(name)) if value is None]:
            raise DataError(
                f"{len(empty)} of {len(dataset)} rows have no value in the column {name}, which the reward function "
                f"{self.function.row_parameters.shown} needs; the first is {dataset.place(empty[0])}. Complete these "
                f"rows, leave them out, or give the parameter {name} a default."
            )

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Result:
        """Score a batch and wait; see :meth:`AbstractRewardManager.__call__`.

        Raises:
            RewardError: more than ``max_error_rate`` of the samples failed.
            SchemaError: the batch lacks a column.
        """
        result = self.start(data).result()
        return result if return_dict else RewardTensor.from_result(result)

    @property
    def scores_single_samples(self) -> bool:
        """True if the function takes one sample, so that samples may be scored before their batch is complete."""
        return self.function.form == "sample"

    def start(self, data: DataProto, is_part: bool = False) -> Deferred[Result]:
        """Start to score a batch and return at once; ``result()`` waits, and raises as :meth:`__call__` does.

        Args:
            data: the batch.
            is_part: these are some samples of a batch, over all of which the caller judges how many may fail. The
                result says under ``failures`` which did, and why; empty if none.
        """
        samples = self.samples(data)

        def checked(scores: Scores) -> Result:
            failures = _failures(samples, scores.samples)
            if not is_part:
                self._report(failures, scores.samples)
            self._log_examples(data, samples, scores.samples)
            return self._result(scores) | ({"failures": failures} if is_part else {})

        return self._scores(data, samples).map(checked)

    async def run_single(self, data: DataProto) -> dict[str, object]:
        """Score one sample without blocking the event loop; a failure becomes its ``reward_status``.

        A subclass with a ``__call__`` or ``start`` of its own scores by that, and raises what it raises.

        Returns:
            ``{"reward_score": float, "reward_extra_info": {name: value}}``.
        """
        cls = type(self)
        if cls.__call__ is not NaiveRewardManager.__call__ or cls.start is not NaiveRewardManager.start:
            return single_score(await AbstractRewardManager.start(self, data).wait())
        return single_score(self._result(await self._scores(data, self.samples(data)).wait()))

    def warm_up(self) -> None:
        """Start the processes that score, without waiting for them."""
        self.function.warm_up()

    def shaped(self, data: DataProto, scores: Scores) -> Scores:
        """Return the scores used in training; a hook for adding terms to the function's scores."""
        return scores

    def _scores(self, data: DataProto, samples: Sequence[RewardSample]) -> Deferred[Scores]:
        """Start scoring; the result has the scores of the samples and of their tokens."""
        tensors = tensors_of(data)
        if not self.has_rule and "rm_scores" in tensors.keys():
            model = token_scores(tensors["rm_scores"], tensors["response_mask"], compute_response_mask(data))
            return Deferred([], lambda: self.shaped(data, model))
        if not self.has_rule:
            if "environment_info" in data.non_tensor_batch and "reward_model" not in data.non_tensor_batch:
                raise RewardError(
                    "the environment gave no reward for an episode, and the rows have no reward_model.ground_truth for "
                    "a scorer. Return a reward from step or score, or set custom_reward_function.path."
                )
            require(data, ("reward_model",), "scoring by data source")
        if self.function.form == "sample":
            scored = self.function.submit_samples(samples, self.tokens(samples)).map(Scores)
        else:
            scored = self.function.submit_batch(data, samples)
        return scored.map(lambda scores: self.shaped(data, place_scores(scores, tensors["response_mask"])))

    def _result(self, scores: Scores) -> Result:
        return {"reward_tensor": scores.tokens, "reward_extra_info": extra_info(scores.samples)}

    def samples(self, data: DataProto) -> list[RewardSample]:
        """Return the reward function's arguments for each row."""
        columns = data.non_tensor_batch
        if self.reward_fn_key != "data_source":
            require(data, (self.reward_fn_key,), "reward_fn_key")
        rows = range(len(data))
        tensors_of(data)  # checks that the columns are there
        texts = response_texts(data, self.tokenizer)
        sources = columns.get(self.reward_fn_key, ["unknown"] * len(data))
        uids = columns.get("uid", [f"row {row}" for row in rows])
        nothing = [None] * len(data)
        truth_columns = zip(columns.get("reward_model", nothing), columns.get("ground_truth", nothing), strict=True)
        truths = [row_truth(*values) for values in truth_columns]
        extras = self._extra_infos(data, texts)
        named = self.function.row_parameters
        columns_given = self._named_columns(data)
        if "raw_prompt" in columns and "prompt" in (*named.required, *named.optional):
            columns_given.setdefault("prompt", columns["raw_prompt"])
        return [
            RewardSample(
                str(sources[i]),
                texts[i].solution_str,
                truths[i],
                extras[i],
                str(uids[i]),
                {name: values[i] for name, values in columns_given.items()},
            )
            for i in rows
        ]

    def _named_columns(self, data: DataProto) -> dict[str, np.ndarray]:
        named, columns = self.function.row_parameters, data.non_tensor_batch
        return {name: columns[name] for name in (*named.required, *named.optional) if name in columns}

    def columns_read(self, data: DataProto) -> dict[str, list]:
        """Return the columns of the rows that the user's function names, beside data source and ground truth."""
        columns = self._named_columns(data)
        is_user_function = self.has_rule and self.format is None
        if is_user_function and self.function.takes_extra_info and "extra_info" in data.non_tensor_batch:
            columns["extra_info"] = data.non_tensor_batch["extra_info"]
        return {name: values.tolist() for name, values in columns.items()}

    def _extra_infos(self, data: DataProto, texts: Sequence[ResponseTexts]) -> list[dict[str, object]]:
        columns, tensors = data.non_tensor_batch, tensors_of(data)
        extras = [dict(info or {}) for info in columns.get("extra_info", [None] * len(data))]
        additions: dict[str, Sequence[object]] = {
            "last_turn_str": [text.last_turn_str for text in texts],
            "conversation_str": [text.conversation_str for text in texts],
        }
        if "__num_turns__" in columns:
            additions["num_turns"] = columns["__num_turns__"].tolist()
        if "raw_prompt" in columns:
            additions["raw_prompt"] = columns["raw_prompt"].tolist()
        if "reward_scores" in columns:
            additions["rollout_reward_scores"] = columns["reward_scores"].tolist()
        if "rm_scores" in tensors.keys():
            additions["rm_score"] = tensors["rm_scores"].sum(-1, dtype=torch.float64).tolist()
        names = ("tool_rewards", "tool_call_counts", "tool_failures")
        additions |= {name: columns[name].tolist() for name in names if name in columns}
        for name, values in additions.items():
            for info, value in zip(extras, values, strict=True):
                info[name] = value
        return extras

    def _report(self, failures: str, scores: Sequence[Score]) -> None:
        """Log the failures of a batch, or raise if they are too many."""
        if not failures:
            return
        if sum(score.status != "ok" for score in scores) > self.max_error_rate * len(scores):
            raise RewardError(
                f"{failures}\nThat is more than max_error_rate={self.max_error_rate}. Correct the reward "
                "function or the data; a higher rate lets the run go on, with the failed samples left out of training."
            )
        text = without_repeated_traceback(failures)
        logger.warning("%s\nFailed samples score 0 and are left out of training.", text)

    def _log_examples(self, data: DataProto, samples: Sequence[RewardSample], scores: Sequence[Score]) -> None:
        shown: Counter[str] = Counter()
        for row, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            if shown[sample.data_source] >= self.num_examine:
                continue
            shown[sample.data_source] += 1
            prompt = self.tokenizer.decode(tensors_of(data)["prompts"][row], skip_special_tokens=True)
            logger.info(
                "[%s]\n[prompt] %s\n[response] %s\n[ground_truth] %s\n[score] %s",
                sample.data_source,
                prompt,
                sample.solution_str,
                sample.ground_truth,
                score.value if score.status == "ok" else score.status,
            )


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Scores a whole batch with one call of a per-batch function (:mod:`verl.workers.reward_manager.function`).

    ``batch_timeout_s`` and ``memory_limit_mb`` are limits of the whole call; if it fails, all samples fail. A function
    for single samples, and the scorers by data source, are called for each sample as by ``naive``.
    """


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """The naive reward manager for per-sample functions only, under the name that PRIME (arXiv:2502.01456) uses.

    A sample that raises or times out does not score 0: it gets a status and is excluded from training.
    """

    forms: tuple[Form, ...] = ("sample",)

    def verify(self, data: DataProto) -> list[float]:
        """Return the score of each sample, and add them to ``data`` as its column ``acc`` (bsz,) float32."""
        scores = self.start(data).result()["reward_extra_info"]["score"]
        data.batch["acc"] = torch.tensor(scores, dtype=torch.float32, device=data.batch["responses"].device)
        return scores


@register("gdpo")
class GDPORewardManager(NaiveRewardManager):
    """Scores with a function that returns several rewards, for GDPO (arXiv:2601.05242).

    The function returns ``{"score": ..., "<reward>": number, ...}``. The rewards named by
    ``algorithm.gdpo_reward_keys`` become columns of the batch, which the estimator ``gdpo`` normalises per group.
    """

    forms: tuple[Form, ...] = ("sample", "texts")


def unreadable_truths(
    dataset: RLHFDataset, reward_format: str | None = None, reward_fn_key: str = "data_source"
) -> list[tuple[int, str, RewardError]]:
    """Return the rows whose ground truth their scorer cannot read: item, scorer and error.

    Args:
        dataset: the opened files.
        reward_format: the scorer of all rows; None takes that of each row's data source.
        reward_fn_key: column with the data source.

    Raises:
        UnknownDataSourceError: a data source has no scorer.
    """
    sources = itertools.repeat(reward_format) if reward_format else map(str, dataset.source_column(reward_fn_key))
    unreadable = []
    for item, (source, value) in enumerate(zip(sources, dataset.source_column("reward_model"), strict=False)):
        try:
            check_truth(source, row_truth(value))
        except UnknownDataSourceError:
            raise
        except RewardError as error:
            unreadable.append((item, source, error))
    return unreadable


def _check_truths(dataset: RLHFDataset, reward_format: str | None = None, reward_fn_key: str = "data_source") -> None:
    if unreadable := unreadable_truths(dataset, reward_format, reward_fn_key):
        item, source, error = unreadable[0]
        tests = sum(error.count for *_, error in unreadable if isinstance(error, UnusableTestsError))
        raise DataError(
            f"{len(unreadable)} of {len(dataset)} rows have a ground truth that their scorer cannot read"
            f"{f' ({tests} tests of programs)' if tests else ''}. The first is "
            f"{dataset.place(item)}, scorer of '{source}': {error}"
        )


def _failures(samples: Sequence[RewardSample], scores: Sequence[Score]) -> str:
    """Describe how many samples failed, and why the first did; empty if none did."""
    failed = [(sample, score) for sample, score in zip(samples, scores, strict=True) if score.status != "ok"]
    if not failed:
        return ""
    counts = Counter(score.status for _, score in failed)
    sample, score = failed[0]
    return (
        f"{len(failed)} of {len(samples)} samples could not be scored ({len(failed) / len(samples):.1%}): "
        f"{', '.join(f'{count} {status}' for status, count in sorted(counts.items()))}. "
        f"The first: sample {sample.uid}, data source '{sample.data_source}', {score.status}:\n{score.error}"
    )
