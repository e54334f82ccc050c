"""Reward functions: their two forms, one call for both, and failures as data.

Per sample, plain or ``async``::

    def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
        return 1.0                        # or {"score": 1.0, "acc": True, ...}

Per batch::

    def compute_reward(data, **kwargs):   # data.responses, data.ground_truth_answers: lists
        return torch.zeros(len(data.batch))

The parameter names tell which form a function has. A per-sample function is given those of the
four that it names (all four, if it has ``**kwargs``).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.schema import require
from verl.utils.reward_score import UnknownDataSourceError

SAMPLE_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
Form = Literal["sample", "batch"]

FORMS = (
    "A reward function has one of two forms: per sample, "
    "(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float or dict with 'score' (may be async); "
    "or per batch, (data: DataProto, **kwargs) -> Tensor of (batch size,) or (batch size, response length)."
)


@dataclass(frozen=True)
class Sample:
    """One response as a reward function sees it, and the names to report it by."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    uid: str = ""

    def arguments(self) -> dict[str, Any]:
        """The four arguments of the per-sample form."""
        return {name: getattr(self, name) for name in SAMPLE_PARAMETERS}


@dataclass(frozen=True)
class Score:
    """What came of one sample: a finite score, or 0 and the traceback of why there is none."""

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class RewardBatch(DataProto):
    """The batch that the per-batch form gets: a ``DataProto`` with decoded texts."""

    responses: list[str]
    """Decoded responses, special tokens left out."""
    ground_truth_answers: list[Any]
    """Ground truth of each sample, None where the data has none."""

    @classmethod
    def of(cls, data: DataProto, samples: Sequence[Sample]) -> RewardBatch:
        """``data`` with the texts of its samples."""
        batch = cls(batch=data.batch, non_tensor_batch=data.non_tensor_batch, meta_info=data.meta_info)
        batch.responses = [sample.solution_str for sample in samples]
        batch.ground_truth_answers = [sample.ground_truth for sample in samples]
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
    """Runs a user's code and keeps what it raised, so that one bad sample does not end a run.

    Configuration errors pass through: they are wrong for every sample.

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
        if not isinstance(error, Exception) or isinstance(error, (ConfigError, UnknownDataSourceError)):
            return False
        self.error = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        return True


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function below any ``functools.partial``."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def form_of(function: Callable[..., Any], bound: Mapping[str, Any]) -> Form:
    """Which form a reward function has.

    Args:
        function: the user's function.
        bound: the keyword arguments from the configuration that it will be given.

    Raises:
        ConfigError: neither form, or a parameter that nobody gives a value.
    """
    parameters = inspect.signature(function).parameters
    named = {name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    shown = f"{getattr(unwrapped(function), '__name__', function)}{inspect.signature(function)}"
    if "solution_str" in named:
        form, given = "sample", {*SAMPLE_PARAMETERS, *bound}
    elif "data" in named:
        form, given = "batch", {"data", *bound}
    else:
        raise ConfigError(f"the reward function {shown} has neither 'solution_str' nor 'data' as a parameter. {FORMS}")
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
    """One call for every form of reward function.

    Args:
        function: the user's function.
        kwargs: further keyword arguments for every call.
        max_concurrent: how many calls of an async function may be under way at once.

    Raises:
        ConfigError: the function has neither form.
    """

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], max_concurrent: int = 64) -> None:
        self.form = form_of(function, kwargs)
        self.max_concurrent = max_concurrent
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._wanted = [name for name in SAMPLE_PARAMETERS if takes_any or name in parameters]
        self._call = functools.partial(function, **kwargs)
        self._is_async = inspect.iscoroutinefunction(function)

    def score_samples(self, samples: Sequence[Sample]) -> list[Score]:
        """Score samples one by one with the per-sample form; a failure concerns its sample alone."""
        if self._is_async:
            return asyncio.run(self._score_concurrently(samples))
        return [self._score(sample) for sample in samples]

    def score_batch(self, data: DataProto, samples: Sequence[Sample]) -> tuple[list[Score], torch.Tensor | None]:
        """Score with the per-batch form.

        Returns:
            a score per sample, and the token scores (bsz, response_length) if the function gave any.
        """
        response_mask = tensors_of(data)["response_mask"]
        shape = (len(samples), response_mask.size(1))
        with Attempt() as attempt:
            result = _checked_tensor(self._call(data=RewardBatch.of(data, samples)), shape)
            if result.dim() == 1:
                return [guarded(value) for value in result.tolist()], None
            return token_scores(result, response_mask)
        return [Score(0.0, error=attempt.error)] * len(samples), None

    def _arguments(self, sample: Sample) -> dict[str, Any]:
        return {name: value for name, value in sample.arguments().items() if name in self._wanted}

    def _score(self, sample: Sample) -> Score:
        with Attempt() as attempt:
            return to_score(self._call(**self._arguments(sample)))
        return Score(0.0, error=attempt.error)

    async def _score_concurrently(self, samples: Sequence[Sample]) -> list[Score]:
        gate = asyncio.Semaphore(self.max_concurrent)

        async def score(sample: Sample) -> Score:
            with Attempt() as attempt:
                async with gate:
                    return to_score(await self._call(**self._arguments(sample)))
            return Score(0.0, error=attempt.error)

        return list(await asyncio.gather(*(score(sample) for sample in samples)))


def to_score(result: Any) -> Score:
    """The result of a per-sample function, checked: a finite number, or a dict whose ``score`` is one.

    Raises:
        RewardError: anything else.
    """
    if not isinstance(result, Mapping):
        return Score(_finite(result))
    if "score" not in result:
        raise RewardError(
            f"the reward function returned a dict without 'score'; it has: {', '.join(map(str, result))}."
        )
    if "reward_status" in result:
        raise RewardError("the reward function returned 'reward_status', which the reward manager sets. Rename it.")
    extra = {str(key): _plain(value) for key, value in result.items() if key != "score"}
    return Score(_finite(result["score"]), extra)


def token_scores(scores: torch.Tensor, response_mask: torch.Tensor) -> tuple[list[Score], torch.Tensor]:
    """Token scores outside the mask become 0; a sample whose scores are not finite becomes an error and all 0."""
    tokens = torch.where(response_mask.bool(), scores.float(), 0.0)
    checked = [guarded(value) for value in tokens.sum(-1).tolist()]
    usable = torch.tensor([score.error is None for score in checked], device=tokens.device)
    return checked, torch.where(usable.unsqueeze(-1), tokens, 0.0)


def guarded(value: float) -> Score:
    """A score that is an error if ``value`` is not finite."""
    with Attempt() as attempt:
        return Score(_finite(value))
    return Score(0.0, error=attempt.error)


def _finite(value: Any) -> float:
    number = _plain(value)
    if not isinstance(number, numbers.Real):
        raise RewardError(f"the reward function returned {type(value).__name__} {value!r:.100}, not a number. {FORMS}")
    if not math.isfinite(number):
        raise RewardError(f"the reward function returned {number}, not a finite number.")
    return float(number)


def _plain(value: Any) -> Any:
    """A 0-d tensor or numpy scalar as a Python scalar; anything else as it is."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        return value.item()
    return value


def _checked_tensor(result: Any, shape: tuple[int, int]) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        raise RewardError(f"the reward function returned {type(result).__name__}, not a torch.Tensor. {FORMS}")
    if tuple(result.shape) not in (shape, shape[:1]):
        raise RewardError(
            f"the reward function returned a tensor of shape {tuple(result.shape)}; "
            f"expected {shape[:1]}, one score per sample, or {shape}, one per token."
        )
    return result.detach().to(device="cpu", dtype=torch.float32)
