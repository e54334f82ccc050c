"""Reward functions: their three forms, one call for all, and failures as data.

Per sample, plain or ``async``::

    def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
        return 1.0                        # or {"score": 1.0, "acc": True, ...}

Per batch, of texts, or of a ``DataProto``::

    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
        return [1.0] * len(solution_strs) # or a list of dicts

    def compute_reward(data, **kwargs):   # data.responses, data.ground_truth_answers: lists
        return torch.zeros(len(data.batch))

The parameter names tell which form a function has. It is given those of the four that it names (all
four, if it has ``**kwargs``). Every call runs in a process of a
:class:`~verl.utils.killable_pool.KillablePool`, under a budget of time and memory.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from tensordict import TensorDict

from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.schema import require
from verl.utils.killable_pool import Budget, KillablePool, Outcome, RateLimit, Status, is_async, unwrapped
from verl.utils.reward_score import UnknownDataSourceError, default_compute_score, is_timed
from verl.utils.reward_score import is_async as has_async_scorer
from verl.utils.reward_score.one_source import source_of

T = TypeVar("T")
S = TypeVar("S")

SAMPLE_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
TEXTS_PARAMETERS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
Form = Literal["sample", "texts", "batch"]
Kind = Literal["plain", "async", "timed"]
"""How scorers share processes: one sample at a time, and while one is stuck another process serves the others;
many at a time; one at a time and no substitutes, for scorers that end in time by themselves."""

FORMS = (
    "A reward function has one of three forms: per sample, "
    "(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float or dict with 'score' (may be async); "
    "per batch of texts, (data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list of these; "
    "or per batch, (data: DataProto, **kwargs) -> Tensor of (batch size,) or (batch size, response length)."
)
BATCH_TIMES = 10
"""A call for a whole batch may take so many times as long as one for a sample, unless its time is set."""
FATAL = (ConfigError, UnknownDataSourceError)
"""Wrong for every sample: raised, and no data."""


@dataclass(frozen=True)
class Sample:
    """One response as a reward function sees it, and the names to report it by."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    uid: str = ""


@dataclass(frozen=True)
class Score:
    """What came of one sample: a finite score, or 0 and the reason why there is none."""

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    status: Status = "ok"
    turn_scores: tuple[float, ...] | None = None
    """A score for each turn of the policy, where the function gave them; ``value`` is their sum."""

    @classmethod
    def failed(cls, status: Status, error: str) -> Score:
        """The score of a sample that has none."""
        return cls(0.0, error=error, status=status)


@dataclass(frozen=True)
class Scores:
    """What came of a batch: a score per sample, and the token scores (bsz, response_length) if there are any."""

    samples: list[Score]
    tokens: torch.Tensor | None = None


@dataclass(frozen=True)
class Pending(Generic[T]):
    """Something that is being computed elsewhere: wait for it in a thread, or await it in an event loop."""

    futures: Sequence[Future[Any]]
    then: Callable[[], T]
    """Puts the results of the futures together; waits for those that are not done."""

    def result(self) -> T:
        """Wait for it."""
        return self.then()

    async def wait(self) -> T:
        """Await it."""
        for future in self.futures:
            await asyncio.wrap_future(future)
        return self.then()

    def map(self, change: Callable[[T], S]) -> Pending[S]:
        """What ``change`` makes of it, once it is there."""
        return Pending(self.futures, lambda: change(self.then()))


class RewardBatch(DataProto):
    """The batch that the per-batch form gets: a ``DataProto`` with decoded texts."""

    responses: list[str]
    """Decoded responses, special tokens left out."""
    ground_truth_answers: list[Any]
    """Ground truth of each sample, None where the data has none."""

    @classmethod
    def of(cls, data: DataProto, responses: list[str], truths: list[Any]) -> RewardBatch:
        """``data`` with the texts of its samples."""
        batch = cls(batch=data.batch, non_tensor_batch=data.non_tensor_batch, meta_info=data.meta_info)
        batch.responses = responses
        batch.ground_truth_answers = truths
        return batch


def tensors_of(data: DataProto) -> TensorDict:
    """The tensor columns of a batch that is to be scored.

    Raises:
        SchemaError: one that scoring reads is missing.
    """
    require(data, ("prompts", "responses", "attention_mask", "response_mask"), "the reward manager")
    assert data.batch is not None
    return data.batch


class Attempt:
    """Keeps what was raised inside, so that one bad sample does not end a run.

    >>> with Attempt() as attempt:
    ...     1 / 0
    >>> attempt.error.splitlines()[-1]
    'ZeroDivisionError: division by zero'
    """

    error: str | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = "".join(traceback.format_exception_only(kind, error)).rstrip()
        return True


def form_of(function: Callable[..., Any], bound: Mapping[str, Any]) -> Form:
    """Which form a reward function has.

    Args:
        function: the user's function.
        bound: the keyword arguments from the configuration that it will be given.

    Raises:
        ConfigError: none of the forms, or a parameter that nobody gives a value.
    """
    parameters = inspect.signature(function).parameters
    named = {name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    shown = f"{getattr(unwrapped(function), '__name__', function)}{inspect.signature(function)}"
    form: Form
    if "solution_str" in named:
        form, given = "sample", {*SAMPLE_PARAMETERS, *bound}
    elif "solution_strs" in named:
        form, given = "texts", {*TEXTS_PARAMETERS, *bound}
    elif "data" in named:
        form, given = "batch", {"data", *bound}
    else:
        raise ConfigError(
            f"the reward function {shown} has neither 'solution_str' nor 'solution_strs' nor 'data' as a parameter. "
            f"{FORMS}"
        )
    required = {n for n in named if parameters[n].default is inspect.Parameter.empty}
    if missing := sorted(required - given):
        raise ConfigError(
            f"the reward function {shown} needs {', '.join(missing)}, which nobody gives. {FORMS} "
            "Give further arguments in custom_reward_function.reward_kwargs."
        )
    if (unknown := sorted(set(bound) - named)) and not takes_any:
        raise ConfigError(f"the reward function {shown} takes no {', '.join(unknown)}, which reward_kwargs gives it.")
    return form


class RewardFunction:
    """One call for every form of reward function, in processes that can be killed.

    Args:
        function: the user's function.
        kwargs: further keyword arguments for every call.
        max_concurrent: how many calls of an async function may be under way at once.
        num_workers: processes that score.
        budget: what the score of one sample may take.
        batch_timeout_s: what a call for a whole batch may take; by default ten times the time of a sample.
        limits: rates that all calls together keep.

    Raises:
        ConfigError: the function has none of the forms, or cannot be sent to another process.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        kwargs: Mapping[str, Any],
        max_concurrent: int = 64,
        num_workers: int = 1,
        budget: Budget | None = None,
        batch_timeout_s: float | None = None,
        limits: Sequence[RateLimit] = (),
    ) -> None:
        self.form = form_of(function, kwargs)
        self.max_concurrent = max_concurrent
        budget = budget or Budget()
        self.batch_timeout_s = batch_timeout_s or BATCH_TIMES * budget.timeout_s
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._wanted = [name for name in (*SAMPLE_PARAMETERS, *TEXTS_PARAMETERS) if name in parameters]
        if takes_any:
            self._wanted = list(SAMPLE_PARAMETERS if self.form == "sample" else TEXTS_PARAMETERS)
        call = functools.partial(function, **kwargs)
        if self.form == "batch":
            call = functools.partial(_call_on_batch, call)
        # By data source, scorers are of several kinds, each with processes of its own.
        by_source = unwrapped(function) is default_compute_score
        source = source_of(function)
        kind: Kind = "timed" if source is not None and _kind(source) == "timed" else "plain"
        if is_async(function) or (by_source and limits):
            kind = "async"
        self._kind_of: Callable[[str], Kind] = _kind if by_source and not limits else lambda _: kind
        kinds: tuple[Kind, ...] = get_args(Kind) if by_source and not limits else (kind,)
        self._pools = {
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

    def score_samples(self, samples: Sequence[Sample]) -> list[Score]:
        """Score samples one by one with the per-sample form; a failure concerns its sample alone.

        Raises:
            WorkerError: the function cannot be loaded in another process.
        """
        return self.submit_samples(samples).result()

    def submit_samples(self, samples: Sequence[Sample], tokens: Sequence[float] | None = None) -> Pending[list[Score]]:
        """As :meth:`score_samples`, without waiting.

        Args:
            samples: what to score.
            tokens: what each takes from a limit of tokens.
        """
        parts: dict[Kind, list[int]] = {}
        for place, sample in enumerate(samples):
            parts.setdefault(self._kind_of(sample.data_source), []).append(place)
        scores: list[Score | None] = [None] * len(samples)
        futures = []
        for kind, places in parts.items():
            costs = None if tokens is None else [tokens[place] for place in places]
            future = self._pools[kind].submit([self._arguments(samples[place]) for place in places], tokens=costs)
            futures.append((future, places))

        def assembled() -> list[Score]:
            for future, places in futures:
                for place, outcome in zip(places, future.result(), strict=True):
                    scores[place] = score_of(outcome)
            return [score for score in scores if score is not None]

        return Pending([future for future, _ in futures], assembled)

    def submit_batch(self, data: DataProto, samples: Sequence[Sample]) -> Pending[Scores]:
        """Score with one of the two forms for a whole batch; a failure of the call concerns all of it."""
        if self.form == "texts":
            call = self._columns(samples)
        else:
            texts, truths = [s.solution_str for s in samples], [s.ground_truth for s in samples]
            call = {"data": data, "responses": texts, "truths": truths}
        future = self._pool.submit([call], self.batch_timeout_s)
        mask = tensors_of(data)["response_mask"]
        return Pending([future], lambda: self._batch_scores(future.result()[0], len(samples), mask))

    def warm_up(self) -> None:
        """Start the processes now; does not wait for them."""
        self._pool.warm_up()

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools.values():
            pool.close()

    def _arguments(self, sample: Sample) -> dict[str, Any]:
        return {name: getattr(sample, name) for name in self._wanted}

    def _columns(self, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        columns: dict[str, str] = dict(zip(TEXTS_PARAMETERS, SAMPLE_PARAMETERS, strict=True))
        return {name: [getattr(sample, columns[name]) for sample in samples] for name in self._wanted}

    def _batch_scores(self, outcome: Outcome, size: int, response_mask: torch.Tensor) -> Scores:
        if outcome.status != "ok":
            return Scores([Score.failed(outcome.status, outcome.message)] * size)
        with Attempt() as attempt:
            if self.form == "texts":
                return Scores([score_of(Outcome("ok", value)) for value in _checked_list(outcome.value, size)])
            result = _checked_tensor(outcome.value, (size, response_mask.size(1)))
            if result.dim() == 1:
                return Scores([score_of(Outcome("ok", value)) for value in result.tolist()])
            return token_scores(result, response_mask)
        return Scores([Score.failed("error", str(attempt.error))] * size)


def score_of(outcome: Outcome) -> Score:
    """What came of a call as the score of its sample."""
    if outcome.status != "ok":
        return Score.failed(outcome.status, outcome.message)
    with Attempt() as attempt:
        return to_score(outcome.value)
    return Score.failed("error", str(attempt.error))


def to_score(result: Any) -> Score:
    """The result of a per-sample function, checked.

    Args:
        result: a finite number; or a dict whose ``score`` is one, or that has ``turn_scores``, a number for
            each turn of the policy, whose sum is the score.

    Raises:
        RewardError: anything else.
    """
    if not isinstance(result, Mapping):
        return Score(_finite(result))
    if "reward_status" in result:
        raise RewardError("the reward function returned 'reward_status', which the reward manager sets. Rename it.")
    extra = {name: value for name, value in result.items() if name not in ("score", "turn_scores")}
    turns = result.get("turn_scores")
    if turns is None:
        if "score" not in result:
            raise RewardError(
                f"the reward function returned a dict without 'score'; it has: {', '.join(map(str, result))}."
            )
        return Score(_finite(result["score"]), extra)
    if not isinstance(turns, list):
        raise RewardError(f"the reward function returned turn_scores={turns!r:.100}, not a list of numbers.")
    values = tuple(_finite(turn) for turn in turns)
    score = _finite(result.get("score", math.fsum(values)))
    if not math.isclose(score, math.fsum(values), rel_tol=1e-6, abs_tol=1e-6):
        raise RewardError(
            f"the reward function returned score={score:g}, and turn_scores whose sum is {math.fsum(values):g}. Leave "
            "'score' out, or give it another name if it is only to be logged."
        )
    return Score(score, extra, turn_scores=values)


def token_scores(scores: torch.Tensor, response_mask: torch.Tensor) -> Scores:
    """Token scores outside the mask become 0; a sample whose scores are not finite becomes an error and all 0."""
    tokens = torch.where(response_mask.bool(), scores.float(), 0.0)
    checked = [score_of(Outcome("ok", value)) for value in tokens.sum(-1).tolist()]
    usable = torch.tensor([score.error is None for score in checked], device=tokens.device)
    return Scores(checked, torch.where(usable.unsqueeze(-1), tokens, 0.0))


def on_turns(score: Score, turns: int) -> Score:
    """The score, or an error if it scores another number of turns than the policy had."""
    if score.turn_scores is None or len(score.turn_scores) == turns:
        return score
    return Score.failed(
        "error",
        f"the reward function returned {len(score.turn_scores)} turn_scores, but the policy had {turns} turns "
        "(runs of ones in response_mask).",
    )


def _call_on_batch(function: Callable[..., Any], data: DataProto, responses: list[str], truths: list[Any]) -> Any:
    return function(data=RewardBatch.of(data, responses, truths))


def _kind(source: str) -> Kind:
    try:
        return "async" if has_async_scorer(source) else "timed" if is_timed(source) else "plain"
    except UnknownDataSourceError:
        return "plain"  # perhaps known in the process that scores, which says so if it is not


def _finite(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise RewardError(f"the reward function returned {type(value).__name__} {value!r:.100}, not a number. {FORMS}")
    if not math.isfinite(value):
        raise RewardError(f"the reward function returned {value}, not a finite number.")
    return float(value)


def _checked_list(result: Any, size: int) -> list[Any]:
    if not isinstance(result, list):
        raise RewardError(f"the reward function returned {type(result).__name__}, not a list. {FORMS}")
    if len(result) != size:
        raise RewardError(f"the reward function returned {len(result)} scores for {size} samples.")
    return result


def _checked_tensor(result: Any, shape: tuple[int, int]) -> torch.Tensor:
    if not isinstance(result, list):
        raise RewardError(f"the reward function returned {type(result).__name__}, not a torch.Tensor. {FORMS}")
    tensor = torch.tensor(result, dtype=torch.float32)
    if tuple(tensor.shape) not in (shape, shape[:1]):
        raise RewardError(
            f"the reward function returned a tensor of shape {tuple(tensor.shape)}; "
            f"expected {shape[:1]}, one score per sample, or {shape}, one per token."
        )
    return tensor
