"""Rule-based scorers, found by data source.

========================================================================== ======================
data source                                                                scorer
========================================================================== ======================
openai/gsm8k, gsm8k                                                        :mod:`.gsm8k`
lighteval/MATH, DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500 :mod:`.math_reward`
countdown                                                                  :mod:`.countdown`
========================================================================== ======================

A scorer is a function ``(solution_str, ground_truth, **settings) -> float | dict``. File one of
your own with ``@register_scorer("my/source")``, or set ``custom_reward_function.path``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from verl.errors import ConfigError, RewardError
from verl.utils.registry import Registry, suggest

Scorer = Callable[..., float | dict[str, Any]]
S = TypeVar("S", bound=Scorer)

SCORERS: Registry[Scorer] = Registry("data source")

LATER = {
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning", "aime"), "competition mathematics scored ±1"),
    **dict.fromkeys(
        ("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12",
         "numina_olympiads"), "Numina mathematics"),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code run against tests"),
    "hiyouga/geometry3k": "geometry with pictures",
    "searchR1_": "question answering with search",
}  # fmt: skip
"""Sources (or how they begin) whose scorer is not in this version, and what it would score."""


class UnknownDataSourceError(RewardError, NotImplementedError):
    """No scorer is registered for a data source."""


def register_scorer(*data_sources: str) -> Callable[[S], S]:
    """Decorator that files a scorer ``(solution_str, ground_truth, **settings)`` under data sources."""

    def file(scorer: S) -> S:
        for source in data_sources:
            SCORERS.register(source)(scorer)
        return scorer

    return file


def get_scorer(data_source: str) -> Scorer:
    """The scorer of a data source.

    Raises:
        UnknownDataSourceError: there is none; the message lists those that exist.
    """
    if data_source in SCORERS:
        return SCORERS.get(data_source)
    later = next((what for start, what in LATER.items() if data_source.startswith(start)), None)
    reason = f"its scorer ({later}) is not in this version" if later else "no scorer has this name"
    raise UnknownDataSourceError(
        f"data source '{data_source}': {reason}.{suggest(data_source, SCORERS.names())} "
        f"Known: {', '.join(SCORERS.names())}. Choose one of them for all rows with reward_model.reward_format, "
        "or write your own: custom_reward_function.path=my_reward.py custom_reward_function.name=compute_score, with "
        "def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float."
    )


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
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

    Raises:
        UnknownDataSourceError: no scorer for this source.
        ConfigError: no scorer has a setting of that name.
        RewardError: there is no ground truth, or the scorer could not decide.
    """
    scorer = get_scorer(data_source)
    if ground_truth is None:
        raise RewardError("the row has no reward_model.ground_truth, which its scorer compares with.")
    beside = {
        "extra_info": extra_info,
        "sandbox_fusion_url": sandbox_fusion_url,
        "concurrent_semaphore": concurrent_semaphore,
        "memory_limit_mb": memory_limit_mb,
    }
    wanted = inspect.signature(scorer).parameters
    if not wanted.keys() >= kwargs.keys():
        check_settings(kwargs)
    given = {name: value for name, value in {**beside, **kwargs}.items() if name in wanted}
    return scorer(solution_str=solution_str, ground_truth=ground_truth, **given)


def check_settings(names: Iterable[str]) -> None:
    """Check names of settings such as ``format_score``.

    Raises:
        ConfigError: a setting that no scorer takes.
    """
    known = _settings()
    for name in names:
        if name not in known:
            raise ConfigError(
                f"no scorer takes the setting '{name}'.{suggest(name, known)} Settings there are: {', '.join(known)}."
            )


def _settings() -> list[str]:
    """Parameters of all scorers beyond the two that every one has."""
    names = {name for source in SCORERS for name in inspect.signature(SCORERS.get(source)).parameters}
    return sorted(names - {"solution_str", "ground_truth", "extra_info"})


# Last, because they register themselves with what is above.
from verl.utils.reward_score import countdown, gsm8k, math_reward  # noqa: E402, F401
