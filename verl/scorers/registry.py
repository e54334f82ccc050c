"""Registry of scorers by data source, and the default reward function, which uses it."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeVar, cast

from verl.base.plugins import PACKAGE, load
from verl.base.registry import Registry, suggest
from verl.errors import ConfigError, RewardError

Result = float | dict[str, object]
Scorer = Callable[..., Result | Awaitable[Result]]
S = TypeVar("S", bound=Scorer)
Kind = Literal["plain", "async", "timed"]
"""Use of processes by a scorer. ``plain``: one sample at a time, and a substitute process while one takes long;
``async``: many samples at a time; ``timed``: one at a time without substitutes, for scorers that limit their own
time."""
NOT_SETTINGS = frozenset({"solution_str", "ground_truth", "extra_info"})
"""Parameters of scorers that are values of a row or its response."""


@dataclass(frozen=True, kw_only=True)
class ScorerInfo:
    """A scorer and the options of its registration."""

    function: Scorer
    check: Callable[[Mapping[str, object]], None] | None
    """Checks the values of its settings."""
    truth: Callable[[object], object] | None
    """Reads a ground truth; raises :class:`RewardError` for one that no response could be compared with."""
    is_timed: bool
    """True if it limits its own time, so that its result depends on the load of the machine."""

    @property
    def settings(self) -> Iterable[str]:
        """Names of its settings."""
        return inspect.signature(self.function).parameters.keys() - NOT_SETTINGS


@dataclass(frozen=True, kw_only=True)
class PluginScorer:
    """A scorer of a plug-in, which is loaded when it is looked up."""

    address: str
    """Address of its :class:`ScorerInfo`, for :func:`verl.base.plugins.load`."""
    settings: Iterable[str]
    """Names of its settings, which are checked in runs that do not load it too."""


class SourceRegistry(Registry[ScorerInfo | PluginScorer]):
    """Scorers by data source; a name that ends in ``*`` matches all sources with that prefix.

    An exact name takes precedence over a prefix, and a longer prefix over a shorter one.
    """

    def get(self, name: str) -> ScorerInfo:
        """Return the scorer of a data source.

        Raises:
            ConfigError: there is none, or it belongs to a plug-in that is not installed.
        """
        entry = super().get(self._matching_name(name) or name)
        return load(entry.address) if isinstance(entry, PluginScorer) else entry

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._matching_name(name) is not None

    def _matching_name(self, source: str) -> str | None:
        if source in self._entries:
            return source
        starts = [name for name in self._entries if name.endswith("*") and source.startswith(name[:-1])]
        return max(starts, key=len, default=None)


SCORERS = SourceRegistry(
    "data source",
    origin=lambda scorer: f"{PACKAGE}.{scorer.address}" if isinstance(scorer, PluginScorer) else scorer.function,
)

MISSING = frozenset({"nan", "<na>", "nat", "null", "inf", "-inf", "infinity", "-infinity"})
"""Texts of missing and infinite numbers in a table that is written as text."""

FORMATS = {"math": "math_reward"}
"""Names of ``reward_model.reward_format`` that are not data sources."""


class UnknownDataSourceError(RewardError, NotImplementedError):
    """No scorer is registered for a data source."""


class UnusableTestsError(RewardError):
    """Tests of a task cannot be judged outside the program."""

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count
        """Number of such tests."""


def register_scorer(
    *data_sources: str,
    check: Callable[[Mapping[str, object]], None] | None = None,
    truth: Callable[[Any], object] | None = None,
    is_timed: bool = False,
) -> Callable[[S], S]:
    """Return a decorator that registers a scorer ``(solution_str, ground_truth, **settings)`` for data sources.

    Args:
        data_sources: names as in the data files; ``"aime*"`` matches all that begin with ``aime``.
        check: raises :class:`ConfigError` for settings that are wrong for every sample.
        truth: raises :class:`RewardError` for a ground truth that no response could be compared with; called for every
            row before a run.
        is_timed: whether it limits its own time, so that its result depends on the load of the machine; then at most
            ``reward_model.num_workers`` samples are scored at once, however long they take.
    """

    def decorator(scorer: S) -> S:
        for source in data_sources:
            SCORERS.add(source, ScorerInfo(function=scorer, check=check, truth=truth, is_timed=is_timed))
        return scorer

    return decorator


def also_called(**names: str) -> Callable[[S], S]:
    """Return a decorator by which a scorer takes other names of its parameters, too: ``solution_str="predict_str"``.

    The signature of the scorer stays.
    """

    def allow(scorer: S) -> S:
        @functools.wraps(scorer)
        def call(*arguments: object, **named: object) -> object:
            renamed = {name: named.pop(other) for name, other in names.items() if other in named}
            return scorer(*arguments, **renamed, **named)

        return cast("S", call)

    return allow


def get_scorer(data_source: str) -> Scorer:
    """Return the scorer of a data source.

    Raises:
        UnknownDataSourceError: there is none; the message lists those that exist.
    """
    return scorer_info(data_source).function


def scorer_info(data_source: str) -> ScorerInfo:
    """Return the scorer of a data source with the options of its registration.

    Raises:
        UnknownDataSourceError: there is none; the message lists those that exist.
    """
    if data_source in SCORERS:
        return SCORERS.get(data_source)
    raise UnknownDataSourceError(
        f"data source '{data_source}': no scorer has this name.{suggest(data_source, SCORERS.names())} "
        f"Known: {', '.join(SCORERS.names())}. Choose one of them for all rows (reward_format), "
        "or write your own (custom_reward_function.path=my_reward.py custom_reward_function.name=compute_score): "
        "def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float."
    )


def kind_of(data_source: str) -> Kind:
    """Return how the scorer of a data source uses processes.

    Raises:
        UnknownDataSourceError: it has no scorer.
    """
    scorer = scorer_info(data_source)
    return "async" if inspect.iscoroutinefunction(scorer.function) else "timed" if scorer.is_timed else "plain"


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: object = None,
    memory_limit_mb: int | None = None,
    **kwargs: object,
) -> object:
    """Score a response with the scorer of its data source.

    A scorer gets only those of the arguments from ``extra_info`` on that it has as parameters.

    Args:
        data_source: as in the data file.
        solution_str: the decoded response.
        ground_truth: ``reward_model.ground_truth`` of the row.
        extra_info: ``extra_info`` of the row.
        sandbox_fusion_url: address of a service that runs code.
        concurrent_semaphore: bounds the concurrent requests to that service.
        memory_limit_mb: MiB of a program's run.
        kwargs: settings of scorers, such as ``format_score``.

    Returns:
        the scorer's result: a number, a dict with ``score``, or an awaitable of these from an async scorer.

    Raises:
        UnknownDataSourceError: no scorer for this source.
        ConfigError: no scorer has a setting of that name.
        RewardError: there is no ground truth, or the scorer failed.
    """
    scorer = get_scorer(data_source)
    parameters = inspect.signature(scorer).parameters
    if not isinstance(solution_str, str):
        raise RewardError(f"solution_str is {type(solution_str).__name__} {solution_str!r:.80}, not a text.")
    if ground_truth is None and parameters["ground_truth"].default is inspect.Parameter.empty:
        raise RewardError(
            f"ground_truth is None (reward_model.ground_truth of the row), and the scorer of '{data_source}' compares "
            "the response with it."
        )
    beside = {
        "extra_info": extra_info,
        "sandbox_fusion_url": sandbox_fusion_url,
        "concurrent_semaphore": concurrent_semaphore,
        "memory_limit_mb": memory_limit_mb,
    }
    if not parameters.keys() >= kwargs.keys():
        check_settings(kwargs)
    arguments = {name: value for name, value in {**beside, **kwargs}.items() if name in parameters}
    return scorer(solution_str=solution_str, ground_truth=ground_truth, **arguments)


def check_settings(settings: Iterable[str] | Mapping[str, object], data_source: str | None = None) -> None:
    """Check settings such as ``format_score``.

    Args:
        settings: names, or names and values.
        data_source: also check the values for the scorer of this source.

    Raises:
        ConfigError: no scorer takes a setting, or a value is invalid.
    """
    names = sorted({name for scorer in SCORERS.entries.values() for name in scorer.settings})
    for name in settings:
        if name not in names:
            raise ConfigError(
                f"no scorer takes the setting '{name}'.{suggest(name, names)} Settings there are: {', '.join(names)}."
            )
    check = scorer_info(data_source).check if data_source is not None else None
    if check is not None and isinstance(settings, Mapping):
        check(settings)


def check_truth(data_source: str, ground_truth: object) -> None:
    """Check that the scorer of a data source can read a ground truth.

    Raises:
        UnknownDataSourceError: it has no scorer.
        RewardError: the scorer cannot read it.
    """
    read = scorer_info(data_source).truth
    if read is not None:
        read(ground_truth)


def row_truth(reward_model: object, column: object = None) -> object:
    """Return the ground truth of a row: that of its ``reward_model``, else its column ``ground_truth``."""
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    return column if truth is None else truth


def text_of_truth(ground_truth: Any) -> str:
    """Return an answer that is given as text or number as text; 73.0 is ``73``.

    A table makes floats of whole numbers as soon as one of them is missing, and the missing one is not a number.

    Raises:
        RewardError: it is something else, blank, or not finite.
    """
    is_number = isinstance(ground_truth, (numbers.Real, Decimal)) and not isinstance(ground_truth, bool)
    if is_number and (isinstance(ground_truth, numbers.Integral) or math.isfinite(ground_truth)):
        integer = math.floor(ground_truth)
        return str(integer if ground_truth == integer else ground_truth)
    text = ground_truth.strip() if isinstance(ground_truth, str) else ""
    if not text or text.lower() in MISSING:
        what = "has no value" if is_number or isinstance(ground_truth, str) else "is neither a text nor a number"
        raise RewardError(
            f"ground_truth {what}: {ground_truth!r:.100} ({type(ground_truth).__name__}). This scorer compares the "
            "answer with a text or a number: correct reward_model.ground_truth of this row, or leave the row out."
        )
    return text


def scorer_for_all(source: str) -> Callable[..., object]:
    """Return a reward function that scores every row with the scorer of ``source`` (``reward_model.reward_format``).

    Raises:
        UnknownDataSourceError: it has no scorer.
    """
    get_scorer(source)
    return functools.partial(_score_as, source)


def source_of(function: Callable[..., object]) -> str | None:
    """Return the ``source`` of a function made by :func:`scorer_for_all`; None for any other function."""
    if isinstance(function, functools.partial) and function.func is _score_as:
        return str(function.args[0])
    return None


def _score_as(
    source: str, /, data_source: str, solution_str: str, ground_truth: object, extra_info: Any, **kwargs: Any
) -> object:
    return default_compute_score(source, solution_str, ground_truth, extra_info, **kwargs)
