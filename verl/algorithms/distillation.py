"""Divergences of the policy from a teacher, chosen by name (``distillation.distillation_loss.loss_mode``).

With p the policy's distribution of the next token and q the teacher's, divergences of one token:

=============================== =========================================== =============================
name                            divergence                                  reads
=============================== =========================================== =============================
k1, k2, k3, abs, ... and k1+    estimates of KL(p ‖ q), as in               log p and log q of the
                                :func:`~verl.algorithms.kl.kl_penalty`      sampled token
forward_kl, forward_kl_topk     KL(q ‖ p) = Σ q (log q - log p)             the whole vocabulary; or the
reverse_kl, reverse_kl_topk     KL(p ‖ q) = Σ p (log p - log q)             teacher's k most likely tokens
jsd, jsd_topk                   β KL(q ‖ m) + (1 - β) KL(p ‖ m)             and one class for all others
                                with m = β q + (1 - β) p
=============================== =========================================== =============================

Papers: the estimators http://joschu.net/blog/kl-approx.html; the divergences arXiv:2306.13649 (GKD); the reverse KL on
the policy's own samples arXiv:2306.08543 (MiniLLM). Add your own with :func:`register_distillation_loss`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from verl.algorithms.kl import KL_KINDS, kl_penalty
from verl.algorithms.loss_registry import over_tokens
from verl.algorithms.signatures import describe_result
from verl.base.registry import Registry
from verl.config import ActorConfig, DistillationConfig, DistillationLossConfig, DivergenceConfig
from verl.errors import ConfigError, SchemaError
from verl.schema import require
from verl.utils.torch_functional import zero_masked

F = TypeVar("F", bound=Callable[..., object])

Reads = Literal["sampled", "topk", "full"]
"""Part of both distributions that a loss reads: log-probs of the sampled tokens, those of the teacher's most likely
tokens, or the whole vocabulary."""

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]
"""Divergences of two distributions; formulas at the top of this module."""

DistillationResult = tuple[Tensor, dict[str, Any]]
"""Losses per token, (bsz, response_length); and metrics without gradient."""

_OUTPUTS: Mapping[Reads, frozenset[str]] = {
    "sampled": frozenset({"log_probs"}),
    "topk": frozenset({"log_probs", "topk_log_probs", "agreement"}),
    "full": frozenset({"log_probs", "divergence", "agreement", "teacher_entropy"}),
}
_COLUMNS: Mapping[Reads, tuple[str, ...]] = {
    "sampled": ("teacher_logprobs",),
    "topk": ("teacher_topk_ids", "teacher_topk_logprobs"),
    "full": (),
}
_PUBLIC_ARGUMENTS = ("config", "distillation_config", "model_output", "data")


@dataclass(frozen=True)
class DistillationLossSettings:
    """Registration of a distillation loss."""

    names: str | list[str]
    """Its names in ``distillation.distillation_loss.loss_mode``."""
    use_topk: bool = False
    """True if it reads the log-probs of the teacher's ``topk`` most likely tokens."""
    use_estimator: bool = False
    """True if it reads the log-probs of the sampled tokens."""
    paper: str = ""
    """Link to its description."""
    reproduces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a published setting → the overrides that select it, beside those of the teacher."""

    def __post_init__(self) -> None:
        """Check the names and the switches."""
        if not self.all_names:
            raise ConfigError('DistillationLossSettings(names=[]): a loss needs a name, such as names="my_divergence".')
        if self.use_topk and self.use_estimator:
            raise ConfigError(
                f"distillation loss '{self.all_names[0]}' has use_topk and use_estimator: it reads either the "
                "teacher's most likely tokens or the sampled ones. Set one of them."
            )

    @property
    def all_names(self) -> list[str]:
        """The names as a list."""
        return [self.names] if isinstance(self.names, str) else list(self.names)

    @property
    def reads(self) -> Reads:
        """Return the part of both distributions that the loss reads."""
        if self.use_topk:
            return "topk"
        return "sampled" if self.use_estimator else "full"


@dataclass(frozen=True, kw_only=True)
class DistillationLossInfo:
    """A distillation loss and its inputs."""

    name: str
    function: Callable[..., Any]
    """The function as it was registered."""
    settings: DistillationLossSettings
    has_public_form: bool
    """True if it takes ``config, distillation_config, model_output, data`` and returns losses and metrics."""

    @property
    def reads(self) -> Reads:
        """Return the part of both distributions that it reads."""
        return self.settings.reads

    @property
    def paper(self) -> str:
        """Link to its description."""
        return self.settings.paper

    @property
    def outputs(self) -> frozenset[str]:
        """Outputs of the policy's engine that it reads, those of its metrics included."""
        return _OUTPUTS[self.reads]

    @property
    def columns(self) -> tuple[str, ...]:
        """Batch columns that it reads beside ``response_mask``."""
        return _COLUMNS[self.reads]

    @functools.cached_property
    def public_form(self) -> Callable[..., DistillationResult]:
        """The loss as a function of ``config, distillation_config, model_output, data``."""
        if self.has_public_form:
            return self.function

        def loss(
            config: ActorConfig,
            distillation_config: DistillationConfig,
            model_output: Mapping[str, Tensor],
            data: Mapping[str, Tensor],
        ) -> DistillationResult:
            sections = config, distillation_config
            return evaluate_distillation_loss(self, model_output, data, distillation_config.distillation_loss, sections)

        return loss


DISTILLATION_LOSSES: Registry[DistillationLossInfo] = Registry("distillation loss", origin=lambda info: info.function)


def register_distillation_loss(loss_settings: DistillationLossSettings) -> Callable[[F], F]:
    """Register a divergence per token under the names of ``loss_settings``; a decorator.

    The function has one of two forms. All tensors are (bsz, response_length) if nothing else is said, and 0 where
    ``response_mask`` is 0; what is returned there is ignored.

    Of tensors; it returns the losses, differentiable in the policy's log-probs::

        use_estimator    (log_probs, teacher_logprobs, config)
        use_topk         (student_topk_logprobs, teacher_topk_logprobs, config)   (bsz, response_length, topk) each

    where ``config`` is ``distillation.distillation_loss``. Or, with these parameter names, the public one::

        (config, distillation_config, model_output, data) -> (losses, metrics)

    ``config`` is ``actor_rollout_ref.actor``; ``model_output`` has ``log_probs``, and ``topk_log_probs`` with
    ``use_topk``; ``data`` has the batch columns, of which teachers add ``teacher_logprobs`` and, with ``use_topk``,
    ``teacher_topk_ids`` and ``teacher_topk_logprobs``. It applies the bounds of the configuration by itself.

    Raises:
        ConfigError: a name is taken, or the loss reads neither the sampled tokens nor the most likely ones: divergences
            of the whole vocabulary are computed inside the engines, where only the built-in ones exist.
    """
    if loss_settings.reads == "full":
        raise ConfigError(
            f"distillation loss '{loss_settings.all_names[0]}' has neither use_topk nor use_estimator: say which "
            "log-probs it reads, those of the teacher's most likely tokens or those of the sampled ones."
        )
    return _register(loss_settings)


def _register(settings: DistillationLossSettings) -> Callable[[F], F]:
    def decorator(function: F) -> F:
        parameters = inspect.signature(function).parameters
        is_public = {"model_output", "data"} <= parameters.keys()
        for name in settings.all_names:
            info = DistillationLossInfo(name=name, function=function, settings=settings, has_public_form=is_public)
            DISTILLATION_LOSSES.add(name, info)
        return function

    return decorator


def distillation_loss_info(name: str) -> DistillationLossInfo:
    """Look up a registered loss.

    Raises:
        ConfigError: there is no such loss; the message lists the known names.
    """
    return DISTILLATION_LOSSES.get(name)


def reads_vocabulary(config: DistillationConfig) -> bool:
    """Return whether the loss compares whole-vocabulary distributions; the policy's workers then hold the teachers."""
    return config.enabled and distillation_loss_info(config.distillation_loss.loss_mode).reads == "full"


def check_distillation_loss(config: DivergenceConfig) -> DistillationLossInfo:
    """Look up the loss of a configuration, and check that the policy can learn from it as ``config`` says.

    Raises:
        ConfigError: there is no such loss; ``topk`` is missing; or its gradient has the expectation zero.
    """
    is_advantage = isinstance(config, DistillationLossConfig) and config.use_policy_gradient
    info, mode = distillation_loss_info(config.loss_mode), config.loss_mode
    if info.reads == "topk" and config.topk is None:
        raise ConfigError(f"distillation_loss.topk=null: {mode} reads the teacher's topk most likely tokens. Set it.")
    if is_advantage and info.reads != "sampled":
        raise ConfigError(
            f"distillation_loss.use_policy_gradient=true with loss_mode={mode}: the divergence of two distributions "
            "is the same whichever token was sampled, so as an advantage it has a gradient of expectation zero. Set "
            "use_policy_gradient=false, or a loss of sampled tokens: k1."
        )
    if not is_advantage and mode in ("kl", "k1"):
        raise ConfigError(
            f"distillation_loss.loss_mode={mode} with use_policy_gradient=false: as a loss its gradient has the "
            "expectation zero, and the policy learns nothing. Set use_policy_gradient=true, or loss_mode=k1+ or k2."
        )
    return info


# ---- computing --------------------------------------------------------------------------------


def evaluate_distillation_loss(
    info: DistillationLossInfo,
    outputs: Mapping[str, Tensor],
    columns: Mapping[str, Tensor],
    config: DivergenceConfig,
    sections: tuple[ActorConfig, DistillationConfig] | None = None,
) -> DistillationResult:
    """Compute the losses per token and the metrics of some rows of a mini-batch.

    Args:
        info: the registered loss.
        outputs: ``info.outputs`` of the policy's engine, with gradient.
        columns: ``response_mask`` and ``info.columns``; with ``span_ends`` the losses are those of spans of text, each
            on the last token of its span.
        config: ``distillation.distillation_loss``, or the section of another command with its settings.
        sections: ``actor_rollout_ref.actor`` and ``distillation``, which losses of the public form read.

    Returns:
        (bsz, response_length) losses, 0 where ``response_mask`` is 0, with |loss| ≤ ``loss_max_clamp``, to be
        aggregated by :func:`~verl.algorithms.agg_loss`; and metrics over the valid tokens: ``distillation/loss_max``
        and ``_min``; ``distillation/agreement``, how often policy and teacher have the same most likely token;
        ``distillation/teacher_entropy``, in nats; ``distillation/student_tail`` and ``teacher_tail``, the probability
        of all tokens beside the teacher's k most likely; each where the loss reads enough for it.

    Raises:
        SchemaError: a column is missing, or a user's loss returned something else than losses per token.
        ConfigError: a loss of the public form has no sections to read.
    """
    mask = columns["response_mask"]
    require(columns, info.columns, f"distillation loss '{info.name}'")
    valid = {name: _zero_masked(outputs[name], mask) for name in info.outputs if name in outputs}
    teacher = {name: _zero_masked(columns[name], mask) for name in info.columns if columns[name].is_floating_point()}
    metrics: dict[str, Any] = {}
    learnt = mask.bool()
    if "span_ends" in columns:
        valid["log_probs"], learnt = span_log_probs(valid["log_probs"], columns["span_ends"], learnt)
        teacher = {name: _zero_masked(values, learnt) for name, values in teacher.items()}
    if info.has_public_form:
        if sections is None:
            raise ConfigError(
                f"distillation loss '{info.name}' reads the sections of verl.trainer.main_ppo, as "
                f"{', '.join(_PUBLIC_ARGUMENTS)}. For this command write it as a function of (log_probs, "
                "teacher_logprobs, config), or with use_topk of (student_topk_logprobs, teacher_topk_logprobs, config)."
            )
        result = info.function(*sections, valid, dict(columns.items()) | teacher)
        losses, metrics = _losses_and_metrics(info.name, result, mask)
    elif info.reads == "sampled":
        losses = info.function(valid["log_probs"], teacher["teacher_logprobs"], config)
    elif info.reads == "topk":
        losses = info.function(valid["topk_log_probs"], teacher["teacher_topk_logprobs"], config)
    else:
        losses = info.function(valid["divergence"], config)
    if not isinstance(losses, Tensor) or losses.shape != mask.shape:
        raise SchemaError(
            f"distillation loss '{info.name}' returned {describe_result(losses)}; it must return one loss per token, "
            f"here {tuple(mask.shape)}."
        )
    if config.loss_max_clamp is not None:
        losses = losses.clamp(-config.loss_max_clamp, config.loss_max_clamp)
    losses = zero_masked(losses, learnt)
    detached = losses.detach()
    extremes = over_tokens({"distillation/loss_max": detached, "distillation/loss_min": detached}, learnt)
    per_token: dict[str, Tensor] = {}
    for name in ("agreement", "teacher_entropy"):
        if name in valid:
            per_token[f"distillation/{name}"] = valid[name].detach()
    if info.reads == "topk":
        per_token["distillation/student_tail"] = _tail(valid["topk_log_probs"].detach()).exp().squeeze(-1)
        per_token["distillation/teacher_tail"] = _tail(teacher["teacher_topk_logprobs"]).exp().squeeze(-1)
    return losses, {**extremes, **over_tokens(per_token, mask), **metrics}


def distillation_rewards(
    info: DistillationLossInfo,
    log_probs: Tensor,
    columns: Mapping[str, Tensor],
    config: DivergenceConfig,
    sections: tuple[ActorConfig, DistillationConfig] | None = None,
) -> Tensor:
    """Compute rewards per token, (bsz, response_length) without gradient: minus the loss of a sampled token.

    As the advantage of its token, that of k1, log q - log p, has the policy gradient -∇KL(p ‖ q) of that token's
    distribution, without bias if the tokens were sampled from p. k3's has the gradient ∇KL(q ‖ p) - ∇KL(p ‖ q), and
    those of k2 and abs that of no divergence: they are biased.

    Args:
        info: a loss that reads ``sampled``.
        log_probs: (bsz, response_length) of the policy that sampled, or at the start of the update.
        columns: ``response_mask`` and ``teacher_logprobs``; with ``span_ends`` each token has the reward of its span,
            since the policy chose the span by all of its tokens.
        config: ``distillation.distillation_loss``.
        sections: as of :func:`evaluate_distillation_loss`.
    """
    losses, _ = evaluate_distillation_loss(info, {"log_probs": log_probs.detach()}, columns, config, sections)
    rewards = -losses.detach()
    if "span_ends" not in columns:
        return rewards
    ends = columns["span_ends"]
    return zero_masked(rewards.gather(1, ends.clamp_min(0)), columns["response_mask"] * (ends >= 0))


def span_log_probs(log_probs: Tensor, span_ends: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the log-probs of the tokens of each span, on its last token.

    Args:
        log_probs: (bsz, response_length) of tokens, 0 where ``mask`` is.
        span_ends: (bsz, response_length) place of the last token of each token's span, -1 for tokens without a span.
        mask: (bsz, response_length) of the tokens that count.

    Returns:
        (bsz, response_length) the sums, 0 elsewhere; and whether the token is the last one of a span. A span with a
        token that does not count, such as one that was rejected, is none.
    """
    ends = span_ends.clamp_min(0)
    missing = torch.zeros_like(log_probs).scatter_add(1, ends, ((span_ends >= 0) & ~mask).to(log_probs.dtype))
    places = torch.arange(span_ends.shape[1], device=span_ends.device)
    is_last = (span_ends == places) & (missing == 0)
    in_span = (span_ends >= 0) & mask
    sums = torch.zeros_like(log_probs).scatter_add(1, ends, zero_masked(log_probs, in_span))
    return zero_masked(sums, is_last), is_last


def _zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """0 in (bsz, response_length, ...) where ``mask`` is 0."""
    return zero_masked(values, mask.view(*mask.shape, *[1] * (values.dim() - mask.dim())))


def _losses_and_metrics(name: str, result: object, mask: Tensor) -> DistillationResult:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return cast(DistillationResult, result)
    raise SchemaError(
        f"distillation loss '{name}' returned {describe_result(result)}; it must return (losses, metrics), here a "
        f"tensor {tuple(mask.shape)} and a dict."
    )


# ---- divergences of two distributions ---------------------------------------------------------


def divergence_terms(
    log_p: Tensor, log_q: Tensor, kind: DivergenceKind, beta: float, log_prob_min: float | None
) -> Tensor:
    """Return the terms of D(p, q) whose sum over the last dimension, the classes, it is; differentiable.

    ``log_prob_min`` bounds each logarithm in the formulas from below, but not the probabilities that weight them.

    Args:
        log_p: (..., classes) of the policy.
        log_q: (..., classes) of the teacher.
        kind: of the divergence.
        beta: weight of q in the mixture of ``jsd``.
        log_prob_min: least logarithm; None for none.
    """

    def bounded(logarithm: Tensor) -> Tensor:
        return logarithm if log_prob_min is None else logarithm.clamp_min(log_prob_min)

    if kind == "forward_kl":
        return log_q.exp() * (bounded(log_q) - bounded(log_p))
    if kind == "reverse_kl":
        return log_p.exp() * (bounded(log_p) - bounded(log_q))
    log_m = bounded(log_mixture(log_p, log_q, beta))
    from_teacher = beta * log_q.exp() * (bounded(log_q) - log_m)
    return from_teacher + (1 - beta) * log_p.exp() * (bounded(log_p) - log_m)


def divergence_gradient(
    log_p: Tensor, log_q: Tensor, kind: DivergenceKind, beta: float, log_prob_min: float | None
) -> Tensor:
    """Return h = p ∂D/∂p of each class, up to a multiple of p; arguments as of :func:`divergence_terms`.

    The gradient in the policy's logits is h - p Σ h, in which that multiple cancels. Without a bound::

        forward_kl   -q        reverse_kl   p (log p - log q)        jsd   (1 - β) p (log p - log m)

    A logarithm at its bound has no gradient.
    """
    if kind == "forward_kl":
        h = -log_q.exp()
        return h if log_prob_min is None else h.masked_fill_(log_p < log_prob_min, 0)
    other = log_q if kind == "reverse_kl" else log_mixture(log_p, log_q, beta)
    if log_prob_min is None:
        h = log_p - other
    else:
        h = log_p.clamp_min(log_prob_min) - other.clamp_min(log_prob_min)
        h -= (log_p < log_prob_min).to(h.dtype)
        if kind == "jsd":
            h += (other < log_prob_min).to(h.dtype)
    h *= log_p.exp()
    return h if kind == "reverse_kl" else h.mul_(1 - beta)


def log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return log(β q + (1 - β) p)."""
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def _tail(log_probs: Tensor) -> Tensor:
    """Return log(1 - Σ p) over the last dimension, kept with size 1.

    Its least value is the logarithm of the dtype's ε, the resolution of the difference, below which it has no gradient.
    """
    eps = torch.finfo(log_probs.dtype).eps
    return (1 - log_probs.exp().sum(-1, keepdim=True)).clamp_min(eps).log()


def _with_tail(log_probs: Tensor) -> Tensor:
    return torch.cat([log_probs, _tail(log_probs)], dim=-1)


def _topk_divergence(student: Tensor, teacher: Tensor, kind: DivergenceKind, config: DivergenceConfig) -> Tensor:
    log_p, log_q = _with_tail(student), _with_tail(teacher)
    return divergence_terms(log_p, log_q, kind, config.beta, config.log_prob_min_clamp).sum(-1)


# ---- the losses -------------------------------------------------------------------------------

_GKD, _MINILLM = "https://arxiv.org/abs/2306.13649", "https://arxiv.org/abs/2306.08543"
_TEACHER_ONLY = (
    "distillation.enabled=true",
    "distillation.distillation_loss.use_task_rewards=false",
    "algorithm.adv_estimator=grpo",
)
_SELF_DISTILLATION = (*_TEACHER_ONLY, "distillation.self_distillation.enabled=true", "data.return_raw_chat=true")
_REPRODUCES: Mapping[str, dict[str, tuple[str, ...]]] = {
    "k1": {
        "On-policy distillation (https://thinkingmachines.ai/blog/on-policy-distillation/)": (
            *_TEACHER_ONLY,
            "distillation.distillation_loss.loss_mode=k1",
            "distillation.distillation_loss.use_policy_gradient=true",
        )
    },
    "jsd": {
        "GKD on the policy's own samples (arXiv:2306.13649)": (
            *_TEACHER_ONLY,
            "distillation.distillation_loss.loss_mode=jsd",
            "distillation.distillation_loss.beta=0.5",
        )
    },
    "forward_kl": {
        "OPSD (arXiv:2601.18734)": (
            *_SELF_DISTILLATION,
            "distillation.distillation_loss.loss_mode=forward_kl",
            "distillation.self_distillation.template=reference",
            "distillation.self_distillation.weights=initial",
        ),
        "SDFT (arXiv:2601.19897)": (
            *_SELF_DISTILLATION,
            "distillation.distillation_loss.loss_mode=forward_kl",
            "distillation.self_distillation.template=demonstration",
            "distillation.self_distillation.weights=ema",
        ),
    },
    "jsd_topk": {
        "SDPO (arXiv:2601.20802)": (
            *_SELF_DISTILLATION,
            "distillation.distillation_loss.loss_mode=jsd_topk",
            "distillation.distillation_loss.beta=0.5",
            "distillation.distillation_loss.topk=100",
            "distillation.self_distillation.template=attempts",
            "distillation.self_distillation.weights=ema",
            "distillation.self_distillation.ema_decay=0.95",
        )
    },
}


def _estimator(kind: str) -> Callable[[Tensor, Tensor, DivergenceConfig], Tensor]:
    """Return the loss of :func:`~verl.algorithms.kl.kl_penalty` of this kind between policy and teacher.

    With x sampled from p and Δ = log p(x) - log q(x), the expected gradients of these losses are (arXiv:2506.09477;
    all are of the distribution of one token, whose prefix is given)::

        kl, k1                        0: not a loss to follow; as a reward it is unbiased
        mse, k2, and every kind +     ∇KL(p ‖ q)
        low_var_kl, k3                ∇KL(q ‖ p): it is the forward KL that falls
        abs                           ∇Σ|p - q|, twice the total variation

    If x was sampled by another policy than p, none of them is unbiased.
    """

    def loss(log_probs: Tensor, teacher_logprobs: Tensor, config: DivergenceConfig) -> Tensor:
        least = config.log_prob_min_clamp
        if least is not None:
            log_probs, teacher_logprobs = log_probs.clamp_min(least), teacher_logprobs.clamp_min(least)
        return kl_penalty(log_probs, teacher_logprobs, kind)

    loss.__qualname__ = f"_estimator.{kind}"  # the registry tells functions apart by their names
    return loss


for _kind in KL_KINDS:
    _settings = DistillationLossSettings(
        _kind,
        use_estimator=True,
        paper="http://joschu.net/blog/kl-approx.html",
        reproduces=_REPRODUCES.get(_kind, {}),
    )
    _register(_settings)(_estimator(_kind))


@_register(DistillationLossSettings("forward_kl_topk", use_topk=True, paper=_GKD))
def forward_kl_topk(student_topk_logprobs: Tensor, teacher_topk_logprobs: Tensor, config: DivergenceConfig) -> Tensor:
    """KL(q ‖ p) over the teacher's k most likely tokens and the class of all others.

    It is never larger than the divergence over the whole vocabulary, and equal to it if p / q is the same on all tokens
    of the tail. Both arguments are (bsz, response_length, k); the gradient is unbiased whoever sampled the prefix.
    """
    return _topk_divergence(student_topk_logprobs, teacher_topk_logprobs, "forward_kl", config)


@_register(DistillationLossSettings("reverse_kl_topk", use_topk=True, paper=_MINILLM))
def reverse_kl_topk(student_topk_logprobs: Tensor, teacher_topk_logprobs: Tensor, config: DivergenceConfig) -> Tensor:
    """KL(p ‖ q) over the teacher's k most likely tokens and the class of all others; see :func:`forward_kl_topk`."""
    return _topk_divergence(student_topk_logprobs, teacher_topk_logprobs, "reverse_kl", config)


@_register(DistillationLossSettings("jsd_topk", use_topk=True, paper=_GKD, reproduces=_REPRODUCES["jsd_topk"]))
def jsd_topk(student_topk_logprobs: Tensor, teacher_topk_logprobs: Tensor, config: DivergenceConfig) -> Tensor:
    """Jensen-Shannon divergence over the teacher's k most likely tokens and the class of all others.

    β KL(q ‖ m) + (1 - β) KL(p ‖ m) with m = β q + (1 - β) p and β = ``distillation_loss.beta``. Divided by β it tends
    to the forward KL as β → 0; divided by 1 - β, to the reverse KL as β → 1. See :func:`forward_kl_topk`.
    """
    return _topk_divergence(student_topk_logprobs, teacher_topk_logprobs, "jsd", config)


@_register(DistillationLossSettings("forward_kl", paper=_GKD, reproduces=_REPRODUCES["forward_kl"]))
def forward_kl(divergence: Tensor, config: DivergenceConfig) -> Tensor:
    """KL(q ‖ p) over the whole vocabulary, (bsz, response_length), which the policy's engine has computed."""
    return divergence


@_register(DistillationLossSettings("reverse_kl", paper=_MINILLM))
def reverse_kl(divergence: Tensor, config: DivergenceConfig) -> Tensor:
    """KL(p ‖ q) over the whole vocabulary, (bsz, response_length), which the policy's engine has computed."""
    return divergence


@_register(DistillationLossSettings("jsd", paper=_GKD, reproduces=_REPRODUCES["jsd"]))
def jsd(divergence: Tensor, config: DivergenceConfig) -> Tensor:
    """Jensen-Shannon divergence over the whole vocabulary, which the policy's engine has computed; see `jsd_topk`."""
    return divergence
