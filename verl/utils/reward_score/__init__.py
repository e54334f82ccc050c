"""Scorers, found by data source.

========================================================================== =============================
data source                                                                scorer
========================================================================== =============================
openai/gsm8k, gsm8k                                                        :mod:`.gsm8k`
lighteval/MATH, DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500 :mod:`.math_reward`
math_dapo, math, math_dapo_reasoning, aime*                                :mod:`.math_dapo`
numina_aops_forum, numina_synthetic_math, numina_amc_aime,
numina_synthetic_amc, numina_cn_k12, numina_olympiads                      :mod:`.prime_math`
hiyouga/geometry3k                                                         :mod:`.geo3k`
searchR1_*                                                                 :mod:`.search_r1_like_qa_em`
countdown                                                                  :mod:`.countdown`
codecontests, apps, codeforces, taco                                       :mod:`.prime_code`
llm_judge (by ``reward_model.reward_format``)                              :mod:`.llm_judge`
========================================================================== =============================

A scorer is a function ``(solution_str, ground_truth, **settings) -> float | dict``, plain or
``async``. File one of your own with ``@register_scorer("my/source")``, or set
``custom_reward_function.path``. :mod:`.format`, :mod:`.length`, :mod:`.repetition` and
:mod:`.combine` hold parts to build one from.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from verl.errors import ConfigError, RewardError
from verl.utils.registry import Registry, suggest

Result = float | dict[str, Any]
Scorer = Callable[..., Result | Awaitable[Result]]
S = TypeVar("S", bound=Scorer)


class SourceRegistry(Registry[Scorer]):
    """Scorers by data source; a name that ends in ``*`` stands for all sources that begin so.

    An exact name wins over a beginning, and a longer beginning over a shorter one.
    """

    def get(self, name: str) -> Scorer:
        """The scorer of a data source.

        Raises:
            ConfigError: there is none.
        """
        return super().get(self._filed(name) or name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._filed(name) is not None

    def _filed(self, source: str) -> str | None:
        if source in self._entries:
            return source
        starts = [name for name in self._entries if name.endswith("*") and source.startswith(name[:-1])]
        return max(starts, key=len, default=None)


SCORERS = SourceRegistry("data source")
CHECKS: dict[Scorer, Callable[[Mapping[str, Any]], None]] = {}
"""For some scorers, what looks at the values of their settings."""
TIMED: set[Scorer] = set()
"""Scorers that end in time by themselves, and whose result depends on how busy the machine is."""


class UnknownDataSourceError(RewardError, NotImplementedError):
    """No scorer is registered for a data source."""


def register_scorer(
    *data_sources: str, check: Callable[[Mapping[str, Any]], None] | None = None, is_timed: bool = False
) -> Callable[[S], S]:
    """Decorator that files a scorer ``(solution_str, ground_truth, **settings)`` under data sources.

    Args:
        data_sources: names as in the data files; ``"aime*"`` stands for all that begin with ``aime``.
        check: raises :class:`ConfigError` for settings that would be wrong for every sample.
        is_timed: whether it ends in time by itself and its result depends on how busy the machine is; then
            no more than ``reward_model.num_workers`` samples are scored at once, however long they take.
    """

    def file(scorer: S) -> S:
        if is_timed:
            TIMED.add(scorer)
        for source in data_sources:
            SCORERS.register(source)(scorer)
        if check is not None:
            CHECKS[scorer] = check
        return scorer

    return file


def get_scorer(data_source: str) -> Scorer:
    """The scorer of a data source.

    Raises:
        UnknownDataSourceError: there is none; the message lists those that exist.
    """
    if data_source in SCORERS:
        return SCORERS.get(data_source)
    raise UnknownDataSourceError(
        f"data source '{data_source}': no scorer has this name.{suggest(data_source, SCORERS.names())} "
        f"Known: {', '.join(SCORERS.names())}. Choose one of them for all rows with reward_model.reward_format, "
        "or write your own: custom_reward_function.path=my_reward.py custom_reward_function.name=compute_score, with "
        "def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float."
    )


def is_async(data_source: str) -> bool:
    """Whether the scorer of a data source must be awaited.

    Raises:
        UnknownDataSourceError: it has no scorer.
    """
    return inspect.iscoroutinefunction(get_scorer(data_source))


def is_timed(data_source: str) -> bool:
    """Whether the scorer of a data source ends in time by itself (see :func:`register_scorer`).

    Raises:
        UnknownDataSourceError: it has no scorer.
    """
    return get_scorer(data_source) in TIMED


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Any:
    """Score a response by the scorer of its data source.

    Args:
        data_source: as in the data file; see :func:`get_scorer`.
        solution_str: the decoded response.
        ground_truth: ``reward_model.ground_truth`` of the row.
        extra_info: ``extra_info`` of the row; for scorers that name it as a parameter, as all that follows.
        sandbox_fusion_url: address of a service that runs code.
        concurrent_semaphore: bounds the calls of that service.
        memory_limit_mb: memory of one of its runs.
        kwargs: settings of scorers, such as ``format_score``; each takes those that it names.

    Returns:
        what the scorer returns: a number, a dict with ``score``, or an awaitable of these from an async
        scorer (see :func:`is_async`).

    Raises:
        UnknownDataSourceError: no scorer for this source.
        ConfigError: no scorer has a setting of that name.
        RewardError: there is no ground truth, or the scorer could not decide.
    """
    scorer = get_scorer(data_source)
    wanted = inspect.signature(scorer).parameters
    if ground_truth is None and wanted["ground_truth"].default is inspect.Parameter.empty:
        raise RewardError("the row has no reward_model.ground_truth, which its scorer compares with.")
    beside = {
        "extra_info": extra_info,
        "sandbox_fusion_url": sandbox_fusion_url,
        "concurrent_semaphore": concurrent_semaphore,
        "memory_limit_mb": memory_limit_mb,
    }
    if not wanted.keys() >= kwargs.keys():
        check_settings(kwargs)
    given = {name: value for name, value in {**beside, **kwargs}.items() if name in wanted}
    return scorer(solution_str=solution_str, ground_truth=ground_truth, **given)


def check_settings(settings: Iterable[str] | Mapping[str, Any], data_source: str | None = None) -> None:
    """Check settings such as ``format_score``.

    Args:
        settings: their names, or names and values.
        data_source: also check whether the values suit the scorer of this source.

    Raises:
        ConfigError: a setting that no scorer takes, or a value that the scorer cannot work with.
    """
    known = _settings()
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"no scorer takes the setting '{name}'.{suggest(name, known)} Settings there are: {', '.join(known)}."
            )
    check = CHECKS.get(get_scorer(data_source)) if data_source is not None else None
    if check is not None and isinstance(settings, Mapping):
        check(settings)


def _settings() -> list[str]:
    """Parameters of all scorers beyond the two that every one has."""
    names = {name for source in SCORERS for name in inspect.signature(SCORERS.get(source)).parameters}
    return sorted(names - {"solution_str", "ground_truth", "extra_info"})


# Last, because they register themselves with what is above.
from verl.utils.reward_score import (  # noqa: E402
    countdown,  # noqa: F401
    geo3k,  # noqa: F401
    gsm8k,  # noqa: F401
    llm_judge,  # noqa: F401
    math_dapo,  # noqa: F401
    math_reward,  # noqa: F401
    prime_code,  # noqa: F401
    prime_math,  # noqa: F401
    search_r1_like_qa_em,  # noqa: F401
)
