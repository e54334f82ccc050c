"""Registry of policy losses, and the evaluation of a registered loss.

A loss has one of two forms:

    terms    (tensors, settings) → LossTerms: pure, per token. All built-in losses have it.
    public   (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
             → (loss, metrics). It aggregates by itself, with ``agg_loss`` and ``config.global_batch_info``.

:func:`evaluate_policy_loss` computes either form from the columns and the totals of a mini-batch; the trainer calls
nothing else. :func:`get_policy_loss_fn` returns either one in the public form.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.algorithms.aggregate import LossTotals, agg_loss
from verl.algorithms.rollout_correction import LOG_RATIO_BOUND
from verl.algorithms.signatures import describe_result, is_required, refuse_unknown, takes_kwargs
from verl.base.registry import Registry, RegistryView
from verl.config.actor import ActorConfig, PolicyLossConfig
from verl.config.base import config_fields
from verl.errors import ConfigError, SchemaError
from verl.schema import COLUMNS, PREPARED
from verl.utils.torch_functional import masked_mean, zero_masked

F = TypeVar("F", bound=Callable[..., object])

Prepare = Callable[[Mapping[str, Any], ActorConfig, int], dict[str, Tensor]]
"""(columns of the whole mini-batch, actor section, seed) → columns by name."""

PolicyLossResult = tuple[Tensor, dict[str, Any]]
"""The loss, a scalar; and metrics: means over the valid tokens given, or extremes (``_max``, ``_min``)."""

TENSORS = ("old_log_prob", "log_prob", "advantages", "response_mask")
"""Tensors that every loss may take, each (bsz, response_length)."""

LOSS_ARGUMENTS = (*TENSORS, "loss_agg_mode", "config", "rollout_is_weights")
"""Keyword arguments of a loss in the public form."""

_LOSS_COLUMNS = COLUMNS.keys() - {"old_log_probs"}  # a loss gets it as old_log_prob
_SETTINGS = config_fields(PolicyLossConfig).keys() | config_fields(ActorConfig).keys()


@dataclass(frozen=True)
class LossTerms:
    """A policy loss before its tokens are weighted and aggregated; every tensor is (bsz, response_length)."""

    losses: Tensor
    is_clipped: Tensor | None = None
    """Mask of tokens whose gradient the loss stops or bounds, for ``actor/pg_clipfrac``; None for no token."""
    is_clipped_lower: Tensor | None = None
    """Mask of tokens at the second bound, for ``actor/pg_clipfrac_lower``; None for no token."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """More per-token metrics by name, reported as means over valid tokens or as extremes (``_max``, ``_min``)."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossInfo:
    """A policy loss, with the inputs that its signature and its registration declare."""

    name: str
    function: Callable[..., Any]
    """The function as it was registered."""
    returns_terms: bool
    """True if it returns :class:`LossTerms`; otherwise it has the public form."""
    columns: frozenset[str]
    """Required batch columns beside ``TENSORS``."""
    optional_columns: frozenset[str]
    """Columns with a default: passed if the batch has them."""
    prepared_columns: frozenset[str]
    """Columns that ``prepare`` computes from the whole mini-batch."""
    takes_weights: bool
    """True if ``rollout_is_weights`` are applied to it, so that single tokens can be weighted or dropped."""
    prepare: Prepare | None
    """Computes the prepared columns."""
    modes: tuple[str, ...] | None
    """The valid aggregation modes; None for all."""
    paper_mode: str | None
    """The aggregation of its paper, where that is part of the method."""
    paper: str
    """Link to its description."""
    reproduces: Mapping[str, tuple[str, ...]]
    """Name of a published setting → the overrides that select it."""

    @property
    def compares_with_rollout(self) -> bool:
        """Return whether it reads ``rollout_log_probs``, and so corrects by itself for samples of another policy."""
        return "rollout_log_probs" in self.columns | self.optional_columns

    @functools.cached_property
    def public_form(self) -> Callable[..., PolicyLossResult]:
        """The loss as a function that may be called with all of ``LOSS_ARGUMENTS`` by keyword."""
        return _public_form_of_terms(self) if self.returns_terms else _without_unread_arguments(self.function)


POLICY_LOSSES: Registry[PolicyLossInfo] = Registry("policy loss", origin=lambda info: info.function)


# ---- registering ------------------------------------------------------------------------------


def register_policy_loss(
    name: str,
    paper: str = "",
    *,
    returns_terms: bool = False,
    prepare: Prepare | None = None,
    modes: Sequence[str] | None = None,
    paper_mode: str | None = None,
    reproduces: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[F], F]:
    """Register a policy loss under ``name`` (``actor.policy_loss.loss_mode``); a decorator.

    The loss is called by keyword with ``old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
    rollout_is_weights``, of which it may omit those it does not use, and returns ``(loss, metrics)``. It may also take
    batch columns (``rollout_log_probs``, ``ref_log_prob``, ...).

    With ``returns_terms`` it returns :class:`LossTerms` instead, and :func:`evaluate_policy_loss` weights and
    aggregates them. Its parameters may be the four tensors (0 where ``response_mask`` is 0), batch columns, and
    settings of ``actor.policy_loss`` or ``actor`` by name.

    A loss is called with one micro-batch. Whatever depends on the whole mini-batch (a mean, a quantile, a random draw)
    is computed by ``prepare(columns, config, seed)``, called once per mini-batch before its rows are distributed; each
    column that it returns is a parameter of the loss with the default None.

    Args:
        name: its value in configurations.
        paper: link to its description.
        returns_terms: which of the two forms it has.
        prepare: (columns of the whole mini-batch, actor section, seed) → columns by name, (bsz, response_length) or
            (bsz,).
        modes: the valid ``loss_agg_mode`` values; None for all.
        paper_mode: the mode of its paper, where that is part of the method.
        reproduces: name of a published setting → the overrides that select it.

    Raises:
        ConfigError: a parameter is unknown and has no default, or the name is taken.
    """

    def decorator(function: F) -> F:
        parameters = inspect.signature(function).parameters
        usual = set(TENSORS) | _SETTINGS if returns_terms else set(LOSS_ARGUMENTS)
        for parameter in parameters.values():
            if prepare is None or parameter.default is not None:  # what is prepared may have any name
                refuse_unknown(f"policy loss '{name}'", parameter, _LOSS_COLUMNS | usual)
        named = {key: p for key, p in parameters.items() if key not in usual}
        prepared = {
            key
            for key, p in named.items()
            if prepare and p.default is None and (key not in COLUMNS or COLUMNS[key].producer == PREPARED)
        }
        columns = {key for key in named if key in _LOSS_COLUMNS} - prepared
        info = PolicyLossInfo(
            name=name,
            function=function,
            returns_terms=returns_terms,
            columns=frozenset(key for key in columns if is_required(named[key])),
            optional_columns=frozenset(key for key in columns if not is_required(named[key])),
            prepared_columns=frozenset(prepared),
            takes_weights=returns_terms or takes_kwargs(parameters) or "rollout_is_weights" in parameters,
            prepare=prepare,
            modes=None if modes is None else tuple(modes),
            paper_mode=paper_mode,
            paper=paper,
            reproduces={key: tuple(overrides) for key, overrides in (reproduces or {}).items()},
        )
        POLICY_LOSSES.add(name, info)
        return function

    return decorator


# ---- looking up -------------------------------------------------------------------------------


def policy_loss_info(name: str) -> PolicyLossInfo:
    """Look up a registered loss.

    Raises:
        ConfigError: there is no such loss.
    """
    return POLICY_LOSSES.get(name)


def get_policy_loss_fn(name: str) -> Callable[..., PolicyLossResult]:
    """Look up a policy loss in the public form: it may be called with all of ``LOSS_ARGUMENTS`` by keyword.

    Raises:
        ConfigError: there is none; the message lists the known names.
    """
    return POLICY_LOSSES.get(name).public_form


POLICY_LOSS_REGISTRY = RegistryView(POLICY_LOSSES, get_policy_loss_fn, register_policy_loss)
"""Policy losses in the public form by name: a mapping under the name by which public code reads and extends it."""


def policy_loss_names() -> list[str]:
    """All registered policy losses."""
    return POLICY_LOSSES.names()


def policy_loss_columns(name: str) -> frozenset[str]:
    """Required batch columns of the loss ``name`` beside ``TENSORS``, prepared ones included.

    Raises:
        ConfigError: there is no such loss.
    """
    info = policy_loss_info(name)
    return info.columns | info.prepared_columns


# ---- computing --------------------------------------------------------------------------------


def bounded_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """clamp(log π - log π_old, ±20) per token, so that no ratio overflows."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def evaluate_policy_loss(
    info: PolicyLossInfo,
    log_prob: Tensor,
    columns: Mapping[str, Tensor],
    rollout_is_weights: Tensor | None,
    loss_agg_mode: str,
    config: Any,
    totals: LossTotals,
    entropy_coeff: float | None = None,
) -> PolicyLossResult:
    """Compute a policy loss and its metrics on some rows of a mini-batch.

    Args:
        info: the registered loss.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        columns: old_log_probs, advantages, response_mask, and those that ``info`` names.
        rollout_is_weights: (bsz, response_length) factors of each token's loss, or None; they get no gradient.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor section, with the settings of the loss.
        totals: denominators of the mini-batch.
        entropy_coeff: the weight of the entropy bonus in force, for users' losses that read it from ``config``;
            None leaves that of ``config``.

    Returns:
        the loss as :func:`agg_loss` scales it; and its metrics. A built-in loss reports ``actor/pg_clipfrac``,
        ``actor/pg_clipfrac_lower``, ``actor/ppo_kl`` (the mean of log π_old - log π) and its own.

    Raises:
        ConfigError: the loss is not valid with ``loss_agg_mode``, or a setting is missing.
        SchemaError: a user's loss returned something else than a scalar and a dict.
    """
    if info.modes is not None and loss_agg_mode not in info.modes:
        raise ConfigError(
            f"policy loss '{info.name}' makes no sense with loss_agg_mode='{loss_agg_mode}': it would divide out the "
            f"lengths that the loss has. Use {info.paper_mode or info.modes[0]}, or one of: {', '.join(info.modes)}."
        )
    extra = info.columns | info.prepared_columns | {name for name in info.optional_columns if name in columns}
    named = {name: columns[name] for name in extra}
    if not info.returns_terms:
        # The public form has no arguments for these: such losses read them from the config.
        current: dict[str, object] = {"global_batch_info": dict(totals)}
        if entropy_coeff is not None:
            current["entropy_coeff"] = entropy_coeff
        result = info.public_form(
            old_log_prob=columns["old_log_probs"],
            log_prob=log_prob,
            advantages=columns["advantages"],
            response_mask=columns["response_mask"],
            loss_agg_mode=loss_agg_mode,
            config=dataclasses.replace(config, **current),
            rollout_is_weights=rollout_is_weights,
            **named,
        )
        return loss_and_metrics(info.name, result)
    mask = columns["response_mask"]
    valid = _valid_tensors(log_prob, columns)
    terms = _terms(info, valid, named, mask, config)
    losses = terms.losses
    if rollout_is_weights is not None:
        losses = losses * zero_masked(rollout_is_weights, mask).detach()
    loss = agg_loss(losses, mask, loss_agg_mode, **totals)
    kl = bounded_log_ratio(valid["old_log_prob"], valid["log_prob"].detach())
    nowhere = torch.zeros_like(kl)
    per_token = {
        "actor/pg_clipfrac": nowhere if terms.is_clipped is None else terms.is_clipped,
        "actor/ppo_kl": kl,
        "actor/pg_clipfrac_lower": nowhere if terms.is_clipped_lower is None else terms.is_clipped_lower,
        **terms.metrics,
    }
    return loss, over_tokens(per_token, mask)


def clipped_tokens(
    info: PolicyLossInfo, log_prob: Tensor, columns: Mapping[str, Tensor], config: object
) -> Tensor | None:
    """Return the mask of tokens at a bound of the policy loss, (bsz, response_length) bool; False where masked out.

    None for a loss of the public form, which does not tell it.

    Args:
        info: the registered loss.
        log_prob: (bsz, response_length) of the policy being updated.
        columns: old_log_probs, advantages, response_mask, and those that ``info`` names.
        config: the actor section, with the settings of the loss.
    """
    if not info.returns_terms:
        return None
    extra = info.columns | info.prepared_columns | {name for name in info.optional_columns if name in columns}
    mask = columns["response_mask"]
    valid = _valid_tensors(log_prob.detach(), columns)
    terms = _terms(info, valid, {name: columns[name] for name in extra}, mask, config)
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    for bound in (terms.is_clipped, terms.is_clipped_lower):
        clipped = clipped if bound is None else clipped | bound.bool()
    return clipped & mask.bool()


def _valid_tensors(log_prob: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Set masked places to zero: their values, even NaN, must reach neither the loss nor the gradient."""
    mask = columns["response_mask"]
    return {
        "old_log_prob": zero_masked(columns["old_log_probs"], mask),
        "log_prob": zero_masked(log_prob, mask),
        "advantages": zero_masked(columns["advantages"], mask),
    }


def _terms(
    info: PolicyLossInfo, valid: Mapping[str, Tensor], named: Mapping[str, Tensor], mask: Tensor, config: Any
) -> LossTerms:
    arguments = {**valid, "response_mask": mask, **named}
    parameters = inspect.signature(info.function).parameters
    return info.function(
        **{name: arguments[name] if name in arguments else _setting(config, p) for name, p in parameters.items()}
    )


def _setting(config: Any, parameter: inspect.Parameter) -> Any:
    for section in (getattr(config, "policy_loss", None), config):
        if hasattr(section, parameter.name):
            value = getattr(section, parameter.name)
            if value is None and parameter.name in ("clip_ratio_low", "clip_ratio_high"):
                return config.clip_ratio  # as in a section that was not made by load_config
            return value
    if is_required(parameter):
        raise ConfigError(f"the policy loss reads the setting '{parameter.name}', but its config has no such setting.")
    return parameter.default


def over_tokens(per_token: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Reduce values of each token, (bsz, response_length), over the valid tokens: to extremes by name, else means."""
    return {name: _over_tokens(name, values.detach(), mask) for name, values in per_token.items()}


def _over_tokens(name: str, values: Tensor, mask: Tensor) -> Tensor:
    if name.endswith("_max"):
        return values.masked_fill(~mask.bool(), -torch.inf).amax()
    if name.endswith("_min"):
        return values.masked_fill(~mask.bool(), torch.inf).amin()
    return masked_mean(values.float() if values.dtype == torch.bool else values, mask)


def loss_and_metrics(name: str, result: object) -> PolicyLossResult:
    """Check the result of the policy loss ``name``.

    Raises:
        SchemaError: it is not a scalar with a dict of metrics.
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        loss = result[0]
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return loss, dict(result[1])
    raise SchemaError(
        f"policy loss '{name}' returned {describe_result(result)}; it should return (loss, metrics): a tensor without "
        "dimensions, as agg_loss makes it, and a dict of numbers by name (old losses return four values)."
    )


# ---- the public form --------------------------------------------------------------------------

PUBLIC_FORM = """
    Args:
        old_log_prob: (bsz, response_length) of the policy at the start of the update.
        log_prob: (bsz, response_length) of the policy being updated, with gradient.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that count.
        loss_agg_mode: see :func:`agg_loss`.
        config: the actor's section, with the settings that the loss reads; its ``global_batch_info`` holds the
            denominators, by default the counts of these rows.
        rollout_is_weights: (bsz, response_length) weights of each token's loss, or None.

    Returns:
        the loss, a scalar; and metrics, floats: means over the valid tokens at hand.
"""


def _public_form_of_terms(info: PolicyLossInfo) -> Callable[..., PolicyLossResult]:
    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = info.paper_mode or "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
        **columns: Tensor | None,
    ) -> PolicyLossResult:
        if config is None:
            raise ConfigError(
                f"the {info.name} policy loss needs the actor's configuration: pass config=ActorConfig(...)."
            )
        if unknown := columns.keys() - (info.columns | info.optional_columns | info.prepared_columns):
            raise TypeError(f"policy loss '{info.name}' reads no column {', '.join(sorted(unknown))}.")
        usual = {"old_log_probs": old_log_prob, "advantages": advantages, "response_mask": response_mask}
        _check_shapes(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
        passed = usual | {name: column for name, column in columns.items() if column is not None}
        if info.prepare is not None and not info.prepared_columns <= passed.keys():
            passed |= info.prepare(usual, config, 0)  # as if these rows were the whole mini-batch
        totals: LossTotals = getattr(config, "global_batch_info", None) or {}
        loss, metrics = evaluate_policy_loss(info, log_prob, passed, rollout_is_weights, loss_agg_mode, config, totals)
        return loss, {name: value.item() for name, value in metrics.items()}

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{info.name}"
    compute.__module__ = info.function.__module__
    compute.__doc__ = (info.function.__doc__ or "") + PUBLIC_FORM
    return compute


def _check_shapes(**tensors: Tensor) -> None:
    try:
        torch.broadcast_shapes(*(tensor.shape for tensor in tensors.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise SchemaError(
            f"the tensors of a policy loss are all (bsz, response_length), and these differ: {shapes}."
        ) from None


def _without_unread_arguments(function: Callable[..., PolicyLossResult]) -> Callable[..., PolicyLossResult]:
    parameters = inspect.signature(function).parameters
    if takes_kwargs(parameters) or all(argument in parameters for argument in LOSS_ARGUMENTS):
        return function

    @functools.wraps(function)
    def call(**arguments: object) -> PolicyLossResult:
        return function(**{key: value for key, value in arguments.items() if key in parameters})

    return call
