"""Reward functions: their three forms, and the class that calls them in killable processes.

Per sample, plain or ``async``::

    def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
        return 1.0                        # or {"score": 1.0, "acc": True, ...}

Per batch, of texts, or of a ``DataProto``::

    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
        return [1.0] * len(solution_strs) # or a list of dicts

    def compute_reward(data, **kwargs):   # data.responses, data.ground_truth_answers: lists
        return torch.zeros(len(data.batch))

The parameter names decide which form a function has. It gets those of the four arguments that it names (all
four, if it has ``**kwargs``), and the columns of the rows that further parameters name, in the second form as lists::

    def compute_score(solution_str, answer, level=1):   # columns answer, and level if the data has it
        return float(solution_str.strip() == answer)

Every call runs in a process of a
:class:`~verl.supervision.killable_pool.KillablePool`, with limits of time and memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict

from verl.base.registry import suggest
from verl.errors import ConfigError, DataError, RewardError
from verl.protocol import DataProto, compute_response_mask, with_response_mask
from verl.schema import require
from verl.scorers import UnknownDataSourceError, default_compute_score, kind_of, source_of
from verl.scorers.registry import Kind
from verl.supervision.killable_pool import Budget, CallResult, KillablePool, RateLimit, is_async, unwrapped
from verl.utils.deferred import Deferred
from verl.workers.reward_manager.scores import FORMS, UNUSABLE, Score, Scores, checked_score, score_of, token_scores

SAMPLE_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
TEXTS_PARAMETERS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
Form = Literal["sample", "texts", "batch"]

JUDGE_PARAMETERS = ("reward_router_address", "reward_model_tokenizer")
"""Arguments that reward functions and managers get that name them, if the run has a judge: the address of its endpoint
(``127.0.0.1:PORT``), and its tokenizer."""
BATCH_TIMES = 10
"""Default timeout of a call for a whole batch, as a multiple of the timeout of a sample."""
FATAL = (ConfigError, UnknownDataSourceError)
"""Errors that concern every sample: they are raised instead of becoming the status of a sample."""


@dataclass(frozen=True)
class RewardSample:
    """Arguments of a reward function for one response, and the ``uid`` that error messages show."""

    data_source: str
    solution_str: str
    ground_truth: object
    extra_info: dict[str, object]
    uid: str = ""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Further columns of the row, for parameters of these names."""


class RewardBatch(DataProto):
    """Argument of a per-batch reward function: a ``DataProto`` with decoded texts."""

    responses: list[str]
    """Text that the policy wrote in each response, without special tokens; see
    :class:`verl.workers.reward_manager.texts.ResponseTexts`."""
    ground_truth_answers: list[object]
    """Ground truth of each sample, None if the data has none."""
    extra_infos: list[dict[str, object]]
    """Values that functions of the other forms get as ``extra_info``."""

    @classmethod
    def from_samples(cls, data: DataProto, samples: Sequence[RewardSample]) -> RewardBatch:
        """Add texts, ground truths and what is known beside them to a batch."""
        batch = cls(batch=data.batch, non_tensor_batch=data.non_tensor_batch, meta_info=data.meta_info)
        batch.responses = [sample.solution_str for sample in samples]
        batch.ground_truth_answers = [sample.ground_truth for sample in samples]
        batch.extra_infos = [sample.extra_info for sample in samples]
        return batch


def tensors_of(data: DataProto) -> TensorDict:
    """Return the tensor columns that scoring a batch reads.

    A batch without ``response_mask`` gets one from ``attention_mask``: every token of the response is the policy's.

    Raises:
        SchemaError: a column that scoring reads is missing.
    """
    require(data, ("prompts", "responses", "attention_mask"), "the reward manager")
    return with_response_mask(data).batch


def form_of(function: Callable[..., object], bound: Mapping[str, object]) -> Form:
    """Determine the form of a reward function.

    Args:
        function: the user's function.
        bound: keyword arguments from the configuration.

    Raises:
        ConfigError: it has none of the forms, a required parameter gets no value, or it does not take a bound argument.
    """
    parameters = inspect.signature(function).parameters
    named = {name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    shown = f"{getattr(unwrapped(function), '__name__', function)}{inspect.signature(function)}"
    form: Form
    if "solution_str" in named:
        form, passed = "sample", {*SAMPLE_PARAMETERS, *bound}
    elif "solution_strs" in named:
        form, passed = "texts", {*TEXTS_PARAMETERS, *bound}
    elif "data" in named:
        form, passed = "batch", {"data", *bound}
    else:
        raise ConfigError(
            f"the reward function {shown} has neither 'solution_str' nor 'solution_strs' nor 'data' as a parameter. "
            f"{FORMS}"
        )
    required = {n for n in named if parameters[n].default is inspect.Parameter.empty}
    missing = sorted(required - passed)
    if form != "batch":
        missing = [name for name in missing if name in JUDGE_PARAMETERS]  # others are columns of the data
    if missing:
        raise ConfigError(
            f"the reward function {shown} needs {', '.join(missing)}, which it does not receive. {FORMS} Pass "
            "further arguments in custom_reward_function.reward_kwargs; reward_router_address and "
            "reward_model_tokenizer exist if the run serves a judge (reward_model.enable=true and "
            "reward_model.rollout.name)."
        )
    if (unknown := sorted(set(bound) - named)) and not takes_any:
        raise ConfigError(f"the reward function {shown} takes no {', '.join(unknown)}, which reward_kwargs gives it.")
    return form


@dataclass(frozen=True)
class RowParameters:
    """Parameters of a reward function for values of the rows.

    Attributes:
        required: those without a default, which must be columns of the data.
        optional: those with one, which get the column of their name if there is one and the row has a value there.
        needs_truth: the ground truth is a parameter without a default.
        shown: the function, for error messages.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    needs_truth: bool = False
    shown: str = ""

    @classmethod
    def from_function(cls, function: Callable[..., object], form: Form, bound: Mapping[str, object]) -> RowParameters:
        """Read the parameters of a function; verl's scorers and functions of a ``DataProto`` have none.

        Args:
            function: a reward function.
            form: its form.
            bound: keyword arguments from the configuration.
        """
        if form == "batch" or source_of(function) is not None or unwrapped(function) is default_compute_score:
            return cls()
        supplied = {
            *SAMPLE_PARAMETERS,
            *TEXTS_PARAMETERS,
            *JUDGE_PARAMETERS,
            *bound,
            *getattr(function, "keywords", {}),
        }
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in by_name]
        required = {p.name for p in parameters if p.default is p.empty}
        names = [p.name for p in parameters if p.name not in supplied]
        return cls(
            tuple(name for name in names if name in required),
            tuple(name for name in names if name not in required),
            bool({"ground_truth", "ground_truths"} & required - {*bound}),
            f"{getattr(unwrapped(function), '__name__', function)}{inspect.signature(function)}",
        )

    def check(self, columns: Collection[str]) -> None:
        """Check that the data has the columns that the function needs.

        Raises:
            ConfigError: one is missing.
        """
        for name in self.required:
            if name not in columns:
                raise ConfigError(
                    f"the reward function {self.shown} needs {name}, which is no column of the data."
                    f"{suggest(name, [*columns, *SAMPLE_PARAMETERS, *TEXTS_PARAMETERS])} "
                    f"Columns: {', '.join(columns)}. {FORMS} Give further arguments in "
                    "custom_reward_function.reward_kwargs, or the parameter a default."
                )

    def check_truths(self, truths: Sequence[object], columns: Collection[str]) -> None:
        """Check that any row has a ground truth, if the function cannot do without.

        Raises:
            DataError: none has.
        """
        if self.needs_truth and all(truth is None for truth in truths):
            raise DataError(
                f"the reward function {self.shown} needs the ground truth, and none of the {len(truths)} rows has one "
                f"in reward_model.ground_truth or in a column ground_truth (columns: {', '.join(columns)}). Name the "
                "column that has it as a parameter of the function, or give ground_truth a default if the function "
                "does without."
            )

    def available(self, columns: Collection[str]) -> list[str]:
        """Return the parameters that one of ``columns`` is given to."""
        return [*self.required, *(name for name in self.optional if name in columns)]


class RewardFunction:
    """Calls a reward function of any form in killable processes.

    Args:
        function: the user's function.
        kwargs: further keyword arguments for every call.
        max_concurrent: concurrent calls over all processes.
        num_workers: processes.
        budget: limits of the call for one sample.
        batch_timeout_s: timeout of a call for a whole batch; by default ten times that of a sample.
        limits: rate limits over all calls.

    Raises:
        ConfigError: the function has none of the forms, or cannot be sent to another process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        kwargs: Mapping[str, object],
        max_concurrent: int = 64,
        num_workers: int = 1,
        budget: Budget | None = None,
        batch_timeout_s: float | None = None,
        limits: Sequence[RateLimit] = (),
    ) -> None:
        self.form = form_of(function, kwargs)
        self.row_parameters = RowParameters.from_function(function, self.form, kwargs)
        self.max_concurrent = max_concurrent
        budget = budget or Budget()
        self.batch_timeout_s = batch_timeout_s or BATCH_TIMES * budget.timeout_s
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._data_parameters = [name for name in (*SAMPLE_PARAMETERS, *TEXTS_PARAMETERS) if name in parameters]
        if takes_any:
            self._data_parameters = list(SAMPLE_PARAMETERS if self.form == "sample" else TEXTS_PARAMETERS)
        call = functools.partial(function, **kwargs)
        if self.form == "batch":
            call = functools.partial(_call_on_batch, call)
        # Scoring by data source mixes scorers of several kinds, and each kind has a pool. Rate limits hold for one
        # pool, so with them there is only one.
        source, by_source = source_of(function), unwrapped(function) is default_compute_score
        kinds: tuple[Kind, ...]
        if by_source and not limits:
            kinds = get_args(Kind)
        elif by_source or is_async(function):
            kinds = ("async",)
        else:
            kinds = ("plain" if source is None else _kind(source),)
        self._pools: dict[Kind, KillablePool] = {
            kind: KillablePool(
                call,
                num_workers,
                budget,
                num_workers if kind == "timed" else max_concurrent,
                limits,
                FATAL,
                side_by_side=kind == "async",
            )
            for kind in kinds
        }
        self._pool = self._pools[kinds[0]]

    @property
    def takes_extra_info(self) -> bool:
        """True if the function gets ``extra_info``: the data's column with further entries."""
        return bool({"extra_info", "extra_infos"} & {*self._data_parameters})

    def score_samples(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Score samples with a function of samples or of texts and wait; a failure is the status of its samples.

        Raises:
            WorkerError: the function cannot be loaded in another process.
        """
        if self.form == "sample":
            return self.submit_samples(samples).result()
        [result] = self._pool.submit([self._texts_call(samples)], self.batch_timeout_s).result()
        return _texts_scores(result, len(samples))

    def submit_samples(
        self, samples: Sequence[RewardSample], tokens: Sequence[float] | None = None
    ) -> Deferred[list[Score]]:
        """Start to score samples with a per-sample function.

        Args:
            samples: arguments of the calls.
            tokens: cost of each call under a limit of tokens.
        """
        parts: dict[Kind, list[int]] = {}
        for index, sample in enumerate(samples):
            kind = _kind(sample.data_source) if len(self._pools) > 1 else next(iter(self._pools))
            parts.setdefault(kind, []).append(index)
        scores: list[Score | None] = [None] * len(samples)
        futures = []
        for kind, places in parts.items():
            costs = None if tokens is None else [tokens[index] for index in places]
            calls = [self._arguments(samples[index]) for index in places]
            future = self._pools[kind].submit(calls, tokens=costs)
            futures.append((future, places))

        def assembled() -> list[Score]:
            for future, places in futures:
                for index, result in zip(places, future.result(), strict=True):
                    scores[index] = score_of(result)
            return [score for score in scores if score is not None]

        return Deferred([future for future, _ in futures], assembled)

    def submit_batch(self, data: DataProto, samples: Sequence[RewardSample]) -> Deferred[Scores]:
        """Start to score a batch with a per-batch function; if the call fails, all samples fail."""
        call = self._texts_call(samples) if self.form == "texts" else {"data": data, "samples": samples}
        future = self._pool.submit([call], self.batch_timeout_s)
        masks = tensors_of(data)["response_mask"], compute_response_mask(data)
        return Deferred([future], lambda: self._batch_scores(future.result()[0], len(samples), *masks))

    def _texts_call(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        attributes: dict[str, str] = dict(zip(TEXTS_PARAMETERS, SAMPLE_PARAMETERS, strict=True))
        named = {name: [getattr(sample, attributes[name]) for sample in samples] for name in self._data_parameters}
        return named | {name: [sample.columns.get(name) for sample in samples] for name in self._columns(samples)}

    def _arguments(self, sample: RewardSample) -> dict[str, object]:
        named = {name: getattr(sample, name) for name in self._data_parameters}
        columns = {name: sample.columns[name] for name in self._columns([sample])}
        optional = self.row_parameters.optional
        return named | {name: value for name, value in columns.items() if value is not None or name not in optional}

    def _columns(self, samples: Sequence[RewardSample]) -> list[str]:
        """Parameters that get a column; all rows of a batch have the same columns."""
        columns = samples[0].columns if samples else {}
        self.row_parameters.check(columns)
        return self.row_parameters.available(columns)

    def warm_up(self) -> None:
        """Start the processes, without waiting for them."""
        self._pool.warm_up()

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools.values():
            pool.close()

    def _batch_scores(
        self, result: CallResult, size: int, response_mask: torch.Tensor, present: torch.Tensor
    ) -> Scores:
        if self.form == "texts" or result.status != "ok":
            return Scores(_texts_scores(result, size))
        try:
            tokens = _checked_tensor(result.value, (size, response_mask.size(1)))
        except UNUSABLE as error:
            return Scores([Score.failed("error", f"{type(error).__name__}: {error}")] * size)
        if tokens.dim() == 1:
            return Scores([checked_score(value) for value in tokens.tolist()])
        return token_scores(tokens, response_mask, present)


def _texts_scores(result: CallResult, size: int) -> list[Score]:
    """Convert the result of a call for all samples; if it failed, so have all of them."""
    if result.status != "ok":
        return [Score.failed(result.status, result.message)] * size
    try:
        return [checked_score(value) for value in _checked_list(result.value, size)]
    except UNUSABLE as error:
        return [Score.failed("error", f"{type(error).__name__}: {error}")] * size


def _call_on_batch(function: Callable[..., object], data: DataProto, samples: Sequence[RewardSample]) -> object:
    return function(data=RewardBatch.from_samples(data, samples))


def _kind(source: str) -> Kind:
    try:
        return kind_of(source)
    except UnknownDataSourceError:
        return "plain"  # it may be registered in the worker only; if it is not, the worker raises the error


def _checked_list(result: object, size: int) -> list[object]:
    if not isinstance(result, list):
        raise RewardError(f"the reward function returned {type(result).__name__}, not a list. {FORMS}")
    if len(result) != size:
        raise RewardError(f"the reward function returned {len(result)} scores for {size} samples.")
    return result


def _checked_tensor(result: object, shape: tuple[int, int]) -> torch.Tensor:
    if not isinstance(result, list):
        raise RewardError(f"the reward function returned {type(result).__name__}, not a torch.Tensor. {FORMS}")
    tensor = torch.tensor(result, dtype=torch.float64)  # float32 would hide the value of a score that it cannot hold
    if tuple(tensor.shape) not in (shape, shape[:1]):
        raise RewardError(
            f"the reward function returned a tensor of shape {tuple(tensor.shape)}; "
            f"expected {shape[:1]}, one score per sample, or {shape}, one per token."
        )
    return tensor
