"""Advantage estimators and policy losses by name; what each needs is read from its parameter names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from verl.errors import ConfigError
from verl.schema import COLUMNS, require
from verl.utils.registry import Registry, suggest

F = TypeVar("F", bound=Callable[..., Any])

SETTINGS = frozenset({"gamma", "lam", "norm_adv_by_std_in_grpo", "config"})
"""Parameters that come from ``algorithm.*``; ``config`` is that whole section."""

LOSS_ARGUMENTS = (
    "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights",
)  # fmt: skip
"""What a policy loss is called with, by keyword."""

_LOSS_COLUMNS = COLUMNS.keys() - {"old_log_probs"}  # a loss gets it as old_log_prob


@dataclass(frozen=True, kw_only=True)
class EstimatorNeeds:
    """What an estimator is called with, as its signature declares it."""

    columns: frozenset[str]
    """Batch columns (of ``verl.schema``) without which it cannot run: ``values`` asks for a critic,
    ``index`` for group ids, ``reward_baselines`` for a greedy rollout."""
    optional_columns: frozenset[str]
    """Columns with a default: handed over if the batch has them, never made for its sake."""
    settings: frozenset[str]
    """Settings of ``algorithm``."""
    wants_all: bool
    """It takes ``**kwargs``: every other column is handed over too."""
    paper: str
    """Where it is described."""


_estimators: Registry[Callable[..., tuple[Tensor, Tensor]]] = Registry("advantage estimator")
_needs: dict[str, EstimatorNeeds] = {}
_losses: Registry[Callable[..., Any]] = Registry("policy loss")
_loss_columns: dict[str, frozenset[str]] = {}


def register_adv_est(name: str, paper: str = "") -> Callable[[F], F]:
    """Decorator: file an advantage estimator under ``name`` (``algorithm.adv_estimator``).

    Its parameter names are what it needs. A batch column (``token_level_rewards``,
    ``response_mask``, ``values``, ...; ``index`` is the group id) without a default is computed for
    it; one with a default is handed over if it is there. Settings (``gamma``, ``lam``, ...) come
    from ``algorithm``. Another parameter is allowed only with a default, as a constant of the
    estimator. ``**kwargs`` gets all other columns.

    Example:
        >>> @register_adv_est("total_reward")
        ... def compute_total_reward(token_level_rewards, response_mask):
        ...     advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
        ...     return advantages, advantages.clone()

    Args:
        name: how configurations call it.
        paper: link to its description.

    Raises:
        ConfigError: a parameter is neither a column nor a setting, or the name is taken.
    """

    def file(function: F) -> F:
        needs = _estimator_needs(_plain(name), function, paper)
        _estimators.register(_plain(name))(function)
        _needs.setdefault(_plain(name), needs)
        return function

    return file


def get_adv_estimator_fn(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The estimator called ``name``, a string or an ``AdvantageEstimator``.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    return _estimators.get(_plain(name))


def adv_needs(name: str) -> EstimatorNeeds:
    """What the estimator called ``name`` is called with.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    get_adv_estimator_fn(name)
    return _needs[_plain(name)]


def estimator_names() -> list[str]:
    """All registered estimators."""
    return _estimators.names()


def compute_advantages(name: str, columns: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Call the estimator ``name`` with the columns and settings that it names.

    Args:
        name: a registered estimator.
        columns: batch columns by name, with the group ids as ``index``.
        settings: values for its other parameters; one that it has a default for may be missing.

    Returns:
        advantages and returns, both (bsz, response_length).

    Raises:
        SchemaError: a column that it needs is missing.
        ConfigError: a setting that it needs is missing.
    """
    needs, function = adv_needs(name), get_adv_estimator_fn(name)
    # An estimator calls the group ids `index`; the batch calls them `uid`.
    required = ["uid" if name == "index" and "index" not in columns else name for name in sorted(needs.columns)]
    require(columns, required, f"advantage estimator '{_plain(name)}'")
    wanted = needs.columns | (needs.optional_columns & columns.keys())
    if needs.wants_all:
        wanted |= columns.keys()
    arguments = {key: columns[key] for key in wanted}
    arguments |= {key: settings[key] for key in needs.settings & settings.keys()}
    parameters = inspect.signature(function).parameters.values()
    if lacking := [p.name for p in parameters if _is_required(p) and p.name not in arguments]:
        raise ConfigError(f"advantage estimator '{_plain(name)}' needs settings that it was not given: {lacking}.")
    return function(**arguments)


def register_policy_loss(name: str, paper: str = "") -> Callable[[F], F]:
    """Decorator: file a policy loss under ``name`` (``actor.policy_loss.loss_mode``).

    It is called by keyword with ``old_log_prob, log_prob, advantages, response_mask, loss_agg_mode,
    config, rollout_is_weights``, of which it may leave out what it does not read, and returns
    ``(loss, metrics)``. It may also name batch columns (``rollout_log_probs``, ``ref_log_prob``, ...).

    Args:
        name: how configurations call it.
        paper: link to its description (kept for readers of the code).

    Raises:
        ConfigError: a parameter is unknown and has no default, or the name is taken.
    """

    def file(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            _refuse_unknown(f"policy loss '{name}'", parameter, _LOSS_COLUMNS | set(LOSS_ARGUMENTS))
        _losses.register(name)(function)
        named = {p.name for p in parameters} - set(LOSS_ARGUMENTS)
        _loss_columns.setdefault(name, frozenset(named & _LOSS_COLUMNS))
        return function

    return file


def get_policy_loss_fn(name: str) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """The policy loss called ``name``; it may be called with all of ``LOSS_ARGUMENTS`` by keyword.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    function = _losses.get(name)
    parameters = inspect.signature(function).parameters
    if _takes_kwargs(parameters) or all(argument in parameters for argument in LOSS_ARGUMENTS):
        return function

    @functools.wraps(function)
    def call(**arguments: Any) -> tuple[Tensor, dict[str, Any]]:
        return function(**{key: value for key, value in arguments.items() if key in parameters})

    return call


def policy_loss_columns(name: str) -> frozenset[str]:
    """Batch columns that the loss ``name`` asks for beside ``LOSS_ARGUMENTS``.

    Raises:
        ConfigError: there is no such loss.
    """
    _losses.get(name)
    return _loss_columns[name]


def _estimator_needs(name: str, function: Callable, paper: str) -> EstimatorNeeds:
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        _refuse_unknown(f"advantage estimator '{name}'", parameter, COLUMNS.keys() | SETTINGS)
    columns = {p.name for p in parameters.values() if p.name in COLUMNS}
    optional = {key for key in columns if not _is_required(parameters[key])}
    return EstimatorNeeds(
        columns=frozenset(columns - optional),
        optional_columns=frozenset(optional),
        settings=frozenset(parameters) & SETTINGS,
        wants_all=_takes_kwargs(parameters),
        paper=paper,
    )


def _refuse_unknown(owner: str, parameter: inspect.Parameter, known: Set[str]) -> None:
    """A required parameter must be known; a constant with a default must not look like a known one misspelt."""
    if parameter.name in known or parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return
    hint = suggest(parameter.name, sorted(known))
    if _is_required(parameter) or hint:
        raise ConfigError(
            f"{owner} has a parameter '{parameter.name}', which nothing provides.{hint} "
            f"Parameters may be {', '.join(sorted(known))}; **kwargs, which gets columns of your own; "
            "or a constant with a default."
        )


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def _takes_kwargs(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _plain(name: str) -> str:
    return str(getattr(name, "value", name))
