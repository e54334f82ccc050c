"""Registry of advantage estimators; parameter names declare which columns and settings each one needs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import Tensor

from verl.algorithms.signatures import describe_result, is_required, refuse_unknown, takes_kwargs
from verl.base.registry import Registry, RegistryView
from verl.errors import ConfigError, SchemaError
from verl.schema import COLUMNS, require

Estimator = Callable[..., tuple[Tensor, Tensor]]
F = TypeVar("F", bound=Callable[..., Any])

SETTINGS = frozenset(
    {
        *("gamma", "lam", "high_level_gamma", "norm_adv_by_std_in_grpo"),
        *("gdpo_reward_keys", "gdpo_reward_weights", "step_advantage_weight", "episode_agents", "config"),
    }
)
"""Parameters that come from ``algorithm.*``; ``config`` is that whole section."""


@dataclass(frozen=True, kw_only=True)
class EstimatorNeeds:
    """An estimator and the inputs that its signature declares."""

    function: Estimator
    columns: frozenset[str]
    """Required batch columns (of ``verl.schema``): ``values`` requires a critic, ``index`` group ids,
    ``reward_baselines`` a greedy rollout.
    """
    optional_columns: frozenset[str]
    """Columns with a default: passed if the batch has them, never computed for the estimator."""
    settings: frozenset[str]
    """Settings of ``algorithm`` that it takes."""
    wants_all: bool
    """True if it takes ``**kwargs`` and so receives all columns."""
    no_kl_in_reward: str
    """Why ``algorithm.use_kl_in_reward`` must be off; empty where it may be on."""
    paper: str
    """Link to its description."""
    reproduces: Mapping[str, tuple[str, ...]]
    """Name of a published setting → the overrides that select it."""


ESTIMATORS: Registry[EstimatorNeeds] = Registry("advantage estimator", origin=lambda needs: needs.function)


def with_public_arguments(function: F) -> F:
    """Let an estimator be called as public code calls all of them, with arguments that it does not use.

    ``config`` (the section ``algorithm``, as an object or a mapping) gives the settings that are not passed otherwise;
    ``epsilon`` and columns that the formula does not have are left out. The signature stays that of the estimator.
    """
    parameters = inspect.signature(function).parameters
    usual = COLUMNS.keys() | SETTINGS | {"epsilon", "index", "config", "alpha", "handle_zero_tail"}
    unused = set() if takes_kwargs(parameters) else usual - parameters.keys()

    @functools.wraps(function)
    def call(*arguments: object, **named: Any) -> tuple[Tensor, Tensor]:
        config = named.get("config")
        by_place = list(parameters)[: len(arguments)]
        for columns in (named.pop("batch", None), named.pop("non_tensor_batch", None)):
            # Public code passes the components of the reward in these two.
            if columns is not None and takes_kwargs(parameters):
                named = {name: columns[name] for name in columns.keys() - set(by_place)} | named
        for name in (SETTINGS & parameters.keys()) - named.keys() - set(by_place):
            value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
            if value is not None:
                named[name] = value
        return function(*arguments, **{name: value for name, value in named.items() if name not in unused})

    return cast("F", call)


def register_adv_est(
    name_or_enum: str,
    paper: str = "",
    *,
    aliases: Sequence[str] = (),
    no_kl_in_reward: str = "",
    reproduces: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[F], F]:
    """Register an advantage estimator under a name (``algorithm.adv_estimator``); a decorator.

    Parameter names declare the inputs. A batch column (``token_level_rewards``, ``response_mask``, ``values``, ...;
    ``index`` is the group id) without a default is computed for the estimator; one with a default is passed if the
    batch has it. Settings (``gamma``, ``lam``, ...) come from ``algorithm``. Any other parameter must have a default,
    as a constant of the estimator. ``**kwargs`` receives all other columns.

    Example:
        >>> @register_adv_est("total_reward")
        ... def compute_total_reward(token_level_rewards, response_mask):
        ...     advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
        ...     return advantages, advantages.clone()

    Args:
        name_or_enum: its value in configurations.
        paper: link to its description.
        aliases: other names of the same function.
        no_kl_in_reward: why its reward must not contain the KL penalty; if given, ``algorithm.use_kl_in_reward`` is
            refused with this reason.
        reproduces: name of a published setting → the overrides that select it.

    Raises:
        ConfigError: a parameter is neither a column nor a setting, or a name is taken.
    """

    def decorator(function: F) -> F:
        parameters = inspect.signature(function).parameters
        for parameter in parameters.values():
            refuse_unknown(f"advantage estimator '{_plain(name_or_enum)}'", parameter, COLUMNS.keys() | SETTINGS)
        columns = {p.name for p in parameters.values() if p.name in COLUMNS}
        optional = {key for key in columns if not is_required(parameters[key])}
        needs = EstimatorNeeds(
            function=function,
            columns=frozenset(columns - optional),
            optional_columns=frozenset(optional),
            settings=frozenset(parameters) & SETTINGS,
            wants_all=takes_kwargs(parameters),
            no_kl_in_reward=no_kl_in_reward,
            paper=paper,
            reproduces={key: tuple(overrides) for key, overrides in (reproduces or {}).items()},
        )
        for known_as in (_plain(name_or_enum), *aliases):
            ESTIMATORS.add(known_as, needs)
        return function

    return decorator


def _advantages_of_the_program(**_: object) -> tuple[Tensor, Tensor]:
    raise ConfigError(
        "adv_estimator is null: the program that made this configuration computes advantages itself. Name an "
        "estimator, or override the stage `advantages` of RayPPOTrainer."
    )


NO_ESTIMATOR = EstimatorNeeds(
    function=_advantages_of_the_program,
    columns=frozenset(),
    optional_columns=frozenset(),
    settings=frozenset(),
    wants_all=True,
    no_kl_in_reward="",
    paper="",
    reproduces={},
)
"""Needs of ``algorithm.adv_estimator=null``: nobody knows which columns and settings the program reads."""


def adv_needs(name: str | None) -> EstimatorNeeds:
    """Look up an estimator (a string or an ``AdvantageEstimator``) with the inputs it declares.

    None, of a program that computes advantages itself, has an estimator that raises a ConfigError.

    Raises:
        ConfigError: there is none; the message lists the known names.
    """
    return NO_ESTIMATOR if name is None else ESTIMATORS.get(_plain(name))


def get_adv_estimator_fn(name_or_enum: str | None) -> Estimator:
    """Look up the function of an estimator; see :func:`adv_needs`."""
    return adv_needs(name_or_enum).function


ADV_ESTIMATOR_REGISTRY = RegistryView(ESTIMATORS, get_adv_estimator_fn, register_adv_est)
"""Functions of the estimators by name: a mapping under the name by which public code reads and extends it."""


def estimator_names() -> list[str]:
    """All registered estimators, aliases included."""
    return ESTIMATORS.names()


def compute_advantages(
    name: str | None, columns: Mapping[str, Any], settings: Mapping[str, object]
) -> tuple[Tensor, Tensor]:
    """Call an estimator with the columns and settings that it declares; return advantages and returns.

    Both are (bsz, response_length). ``columns`` has the group ids as ``index``; ``settings`` may lack those with a
    default.

    Raises:
        SchemaError: a required column is missing, or the estimator returned something else.
        ConfigError: a required setting is missing.
    """
    needs, estimator = adv_needs(name), f"advantage estimator '{_plain(name)}'"
    # An estimator calls the group ids `index`; the batch calls them `uid`.
    required = ["uid" if name == "index" and "index" not in columns else name for name in sorted(needs.columns)]
    require(columns, required, estimator)
    names = needs.columns | (needs.optional_columns & columns.keys())
    if needs.wants_all:
        names |= columns.keys()
    arguments = {key: columns[key] for key in names}
    arguments |= {key: settings[key] for key in needs.settings & settings.keys()}
    parameters = inspect.signature(needs.function).parameters.values()
    if lacking := [p.name for p in parameters if is_required(p) and p.name not in arguments]:
        raise ConfigError(f"{estimator} needs settings that are missing: {lacking}.")
    result = needs.function(**arguments)
    shape = columns["response_mask"].shape if "response_mask" in columns else None
    if isinstance(result, tuple) and len(result) == 2:
        advantages, returns = result
        if all(isinstance(tensor, Tensor) and shape in (None, tensor.shape) for tensor in result):
            return advantages, returns
    raise SchemaError(
        f"{estimator} returned {describe_result(result)}; it should return (advantages, returns), tensors "
        f"of shape {'(bsz, response_length)' if shape is None else tuple(shape)}, that of response_mask."
    )


def _plain(name: str | None) -> str:
    return str(getattr(name, "value", name))
