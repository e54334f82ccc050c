"""Advantage estimators and policy losses by name; what each needs is read from its parameter names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from verl.errors import ConfigError, SchemaError
from verl.schema import COLUMNS, PREPARED, require
from verl.utils.registry import Registry, suggest

F = TypeVar("F", bound=Callable[..., Any])

Prepare = Callable[[Mapping[str, Any], Any, int], dict[str, Tensor]]
"""(columns of the whole mini-batch, the actor's section, seed) to columns by name."""

SETTINGS = frozenset({"gamma", "lam", "norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights", "config"})
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
    no_kl_in_reward: str
    """Why ``algorithm.use_kl_in_reward`` must be off; empty where it may be on."""
    paper: str
    """Where it is described."""
    reproduces: Mapping[str, tuple[str, ...]]
    """Name of a published setting → the overrides that select it."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossInfo:
    """What a policy loss is called with, as its signature and its registration declare it."""

    columns: frozenset[str]
    """Batch columns beside ``LOSS_ARGUMENTS`` without which it cannot run."""
    optional_columns: frozenset[str]
    """Columns with a default: handed over if the batch has them."""
    prepared_columns: frozenset[str]
    """Columns that ``prepare`` makes from the whole mini-batch."""
    takes_weights: bool
    """It reads ``rollout_is_weights``, so single tokens can be weighed or taken out of it."""
    prepare: Prepare | None
    """Makes the prepared columns."""
    modes: tuple[str, ...] | None
    """The aggregation modes that make sense for it; None for all."""
    paper_mode: str | None
    """The aggregation of its paper, where that is part of the method."""
    paper: str
    """Where it is described."""
    reproduces: Mapping[str, tuple[str, ...]]
    """Name of a published setting → the overrides that select it."""


_estimators: Registry[Callable[..., tuple[Tensor, Tensor]]] = Registry("advantage estimator")
_needs: dict[str, EstimatorNeeds] = {}
_losses: Registry[Callable[..., Any]] = Registry("policy loss")
_loss_infos: dict[str, PolicyLossInfo] = {}


def register_adv_est(
    name: str,
    paper: str = "",
    *,
    aliases: Sequence[str] = (),
    no_kl_in_reward: str = "",
    reproduces: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[F], F]:
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
        aliases: other names of the same function.
        no_kl_in_reward: why the reward that it reads may hold no KL; refuses ``algorithm.use_kl_in_reward``.
        reproduces: name of a published setting → the overrides that select it.

    Raises:
        ConfigError: a parameter is neither a column nor a setting, or a name is taken.
    """

    def file(function: F) -> F:
        published = {key: tuple(overrides) for key, overrides in (reproduces or {}).items()}
        needs = _estimator_needs(_plain(name), function, paper, no_kl_in_reward, published)
        for known_as in (_plain(name), *aliases):
            _estimators.register(known_as)(function)
            _needs.setdefault(known_as, needs)
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
        SchemaError: a column that it needs is missing, or it returned something else.
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
    return _checked_advantages(_plain(name), function(**arguments), columns)


def register_policy_loss(
    name: str,
    paper: str = "",
    *,
    prepare: Prepare | None = None,
    modes: Sequence[str] | None = None,
    paper_mode: str | None = None,
    reproduces: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[F], F]:
    """Decorator: file a policy loss under ``name`` (``actor.policy_loss.loss_mode``).

    It is called by keyword with ``old_log_prob, log_prob, advantages, response_mask, loss_agg_mode,
    config, rollout_is_weights``, of which it may leave out what it does not read, and returns
    ``(loss, metrics)``. It may also name batch columns (``rollout_log_probs``, ``ref_log_prob``, ...).

    A loss sees one micro-batch. What has to be known of the whole mini-batch (a mean, a quantile, a
    random draw) is made by ``prepare(columns, config, seed)``, called once per mini-batch before
    its rows are dealt out; each column that it returns is a parameter of the loss with the default
    None.

    Args:
        name: how configurations call it.
        paper: link to its description.
        prepare: from the columns of the whole mini-batch, the actor's section and a seed to columns
            by name, (bsz, response_length) or (bsz,).
        modes: the ``loss_agg_mode`` values that make sense for it; None for all.
        paper_mode: the one of its paper, where that is part of the method.
        reproduces: name of a published setting → the overrides that select it.

    Raises:
        ConfigError: a parameter is unknown and has no default, or the name is taken.
    """

    def file(function: F) -> F:
        parameters = inspect.signature(function).parameters
        for parameter in parameters.values():
            if prepare is None or parameter.default is not None:  # what is prepared may have any name
                _refuse_unknown(f"policy loss '{name}'", parameter, _LOSS_COLUMNS | set(LOSS_ARGUMENTS))
        named = {key: p for key, p in parameters.items() if key not in LOSS_ARGUMENTS}
        prepared = {key for key, p in named.items() if prepare and p.default is None and _is_prepared(key)}
        columns = {key for key in named if key in _LOSS_COLUMNS} - prepared
        info = PolicyLossInfo(
            columns=frozenset(key for key in columns if _is_required(named[key])),
            optional_columns=frozenset(key for key in columns if not _is_required(named[key])),
            prepared_columns=frozenset(prepared),
            takes_weights=_takes_kwargs(parameters) or "rollout_is_weights" in parameters,
            prepare=prepare,
            modes=None if modes is None else tuple(modes),
            paper_mode=paper_mode,
            paper=paper,
            reproduces={key: tuple(overrides) for key, overrides in (reproduces or {}).items()},
        )
        _losses.register(name)(function)
        _loss_infos.setdefault(name, info)
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


def policy_loss_names() -> list[str]:
    """All registered policy losses."""
    return _losses.names()


def policy_loss_info(name: str) -> PolicyLossInfo:
    """What the loss ``name`` is called with, and where it comes from.

    Raises:
        ConfigError: there is no such loss.
    """
    _losses.get(name)
    return _loss_infos[name]


def policy_loss_columns(name: str) -> frozenset[str]:
    """Batch columns that the loss ``name`` cannot do without, beside ``LOSS_ARGUMENTS``.

    Raises:
        ConfigError: there is no such loss.
    """
    info = policy_loss_info(name)
    return info.columns | info.prepared_columns


def prepare_policy_loss(name: str, columns: Mapping[str, Any], config: Any, seed: int) -> dict[str, Tensor]:
    """The columns that the loss ``name`` wants made from a whole mini-batch; none if it wants none.

    Args:
        name: a registered loss.
        columns: of the whole mini-batch, all ranks' rows, in the order of the batch.
        config: the actor's section.
        seed: of its random draws.

    Returns:
        columns by name, each with as many rows.

    Raises:
        ConfigError: there is no such loss, or its ``prepare`` made other columns than it names.
        SchemaError: a column that ``prepare`` reads is missing.
    """
    info = policy_loss_info(name)
    if info.prepare is None:
        return {}
    made = info.prepare(columns, config, seed)
    if made.keys() != info.prepared_columns:
        raise ConfigError(
            f"the prepare function of policy loss '{name}' made columns {sorted(made)}, but the loss has parameters "
            f"with default None for {sorted(info.prepared_columns)}. Make them the same."
        )
    return made


def loss_and_metrics(name: str, result: Any) -> tuple[Tensor, dict[str, Any]]:
    """What the policy loss ``name`` returned, checked.

    Raises:
        SchemaError: it is no scalar with a dict of metrics.
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        loss = result[0]
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return loss, dict(result[1])
    raise SchemaError(
        f"policy loss '{name}' returned {_described(result)}; it should return (loss, metrics): a tensor without "
        "dimensions, as agg_loss makes it, and a dict of numbers by name (old losses return four values)."
    )


def _checked_advantages(name: str, result: Any, columns: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    shape = columns["response_mask"].shape if "response_mask" in columns else None
    if isinstance(result, tuple) and len(result) == 2:
        advantages, returns = result
        if all(isinstance(made, Tensor) and shape in (None, made.shape) for made in result):
            return advantages, returns
    raise SchemaError(
        f"advantage estimator '{name}' returned {_described(result)}; it should return (advantages, returns), tensors "
        f"of shape {'(bsz, response_length)' if shape is None else tuple(shape)}, that of response_mask."
    )


def _described(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"{type(result).__name__} of {', '.join(map(_described, result)) or 'nothing'}"
    return f"Tensor {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__


def _is_prepared(name: str) -> bool:
    return name not in COLUMNS or COLUMNS[name].producer == PREPARED


def _estimator_needs(
    name: str, function: Callable, paper: str, no_kl_in_reward: str, reproduces: Mapping[str, tuple[str, ...]]
) -> EstimatorNeeds:
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
        no_kl_in_reward=no_kl_in_reward,
        paper=paper,
        reproduces=reproduces,
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
