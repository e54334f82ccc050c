"""Importance weights and rejection of off-policy samples: pure functions of log-ratios.

The rollout engine samples from μ (other kernels, another precision, older weights, truncated sampling); the
trainer's policy at the start of the update is π. Everything here is a function of

    Δ_t = log π(y_t) - log μ(y_t)        ρ_t = e^{Δ_t}

and of the response mask. All is computed in float64, so that sums over long responses stay precise, and without
gradient: a weight is a constant of the loss. Exponents are clamped to ±``LOG_RATIO_BOUND``. Values at masked positions
are ignored; a response without a valid token has ratio 1 and divergence 0, so it is neither weighted nor rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from verl.base.registry import suggest
from verl.errors import ConfigError
from verl.utils.torch_functional import masked_mean, zero_masked

if TYPE_CHECKING:
    from verl.config.rollout_correction import RolloutCorrectionConfig

LOG_RATIO_BOUND = 20.0
"""|Δ|, and the |sum| of Δ over a response, are clamped to this before exp: ratios lie in [2.1e-9, 4.9e8]."""

Level = Literal["token", "sequence"]
"""Unit of a weight or a rejection: one token, or all tokens of a response."""

REJECTION_CRITERIA = (
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""The statistics that samples can be rejected by."""


class Band(NamedTuple):
    """An interval lower ≤ x ≤ upper; None as lower end means no lower bound."""

    lower: float | None
    upper: float

    def contains(self, x: Tensor) -> Tensor:
        """Return whether each element of ``x`` is inside the bounds; NaN is not."""
        inside = x <= self.upper
        return inside if self.lower is None else inside & (x >= self.lower)


class Criterion(NamedTuple):
    """A rejection criterion: the statistic, and the band of accepted values."""

    name: str
    band: Band

    @property
    def level(self) -> Level:
        """Return whether single tokens or whole responses are rejected."""
        return "token" if self.name.startswith("token") else "sequence"


# ---- settings ---------------------------------------------------------------------------------


def parse_is_threshold(threshold: float | str) -> Band:
    """Parse ``rollout_is_threshold``: a number C caps weights at C; ``"lo_hi"`` sets weights outside [lo, hi] to 0.

    The cap is truncated importance sampling (https://fengyao.notion.site/off-policy-rl); the band is IcePop
    (https://arxiv.org/abs/2510.18855). A band from 0 has no lower bound: masked importance sampling, by response TRL's
    ``vllm_importance_sampling_mode="sequence_mask"``.

        2.0 → Band(None, 2.0)        "0.5_5.0" → Band(0.5, 5.0)        "0.0_3.0" → Band(0.0, 3.0)

    Raises:
        ConfigError: a cap below 1, or a band that does not contain 1: a token on which π and μ agree would not
            keep its weight of 1.
    """
    lower, upper = _numbers(threshold)
    if upper < 1 or (lower is not None and lower > 1):
        raise ConfigError(
            f"rollout_is_threshold={threshold} must be a cap of at least 1, such as 2.0, or a band lo_hi around 1, "
            "such as 0.5_5.0; a token on which rollout and trainer agree has the ratio 1. (YAML reads 0.5_5 as "
            "the number 0.55: write 0.5_5.0.)"
        )
    return Band(lower, upper)


def parse_criteria(rollout_rs: str, thresholds: float | str | None) -> tuple[Criterion, ...]:
    """Parse ``rollout_rs`` and ``rollout_rs_threshold``: comma-separated criteria and their thresholds.

    A single threshold applies to all criteria. For k1 a threshold is a band of ratios ``"lo_hi"``; a single number U
    means [1/U, U]. For k2 and k3, which are divergences, it is an upper bound.

        "seq_mean_k1,seq_max_k2", "0.999_1.001,0.5"  →  seq_mean_k1 in [0.999, 1.001], seq_max_k2 ≤ 0.5

    Raises:
        ConfigError: an unknown or repeated criterion, no threshold, another number of thresholds than of
            criteria, or a threshold that would reject samples on which π and μ agree.
    """
    names = [name.strip() for name in rollout_rs.split(",")]
    for name in names:
        if name not in REJECTION_CRITERIA:
            raise ConfigError(
                f"rollout_rs={rollout_rs}: there is no criterion '{name}'.{suggest(name, list(REJECTION_CRITERIA))} "
                f"Known: {', '.join(REJECTION_CRITERIA)}; several are separated by commas."
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"rollout_rs={rollout_rs} names a criterion twice; name each once, with its own threshold.")
    if thresholds is None:
        raise ConfigError(
            f"rollout_rs={rollout_rs} needs rollout_rs_threshold: a band of ratios for k1, such as 0.5_2.0 "
            "(0.999_1.001 for seq_mean_k1), an upper bound for k2 and k3, such as 0.01."
        )
    texts = str(thresholds).split(",")
    if len(texts) not in (1, len(names)):
        raise ConfigError(
            f"rollout_rs_threshold={thresholds} has {len(texts)} thresholds, and rollout_rs={rollout_rs} has "
            f"{len(names)} criteria: give one for each in the same order, or one for all."
        )
    texts = texts * len(names) if len(texts) == 1 else texts
    return tuple(Criterion(name, _rs_band(name, text)) for name, text in zip(names, texts, strict=True))


def _rs_band(name: str, threshold: str) -> Band:
    lower, upper = _numbers(threshold)
    if name.endswith("k1"):
        lower = 1 / upper if lower is None else lower
        if not 0 < lower <= 1 <= upper:
            raise ConfigError(
                f"the rollout_rs_threshold of {name}, {threshold}, must be a band of ratios around 1, such as 0.5_2.0, "
                "or a number U of at least 1, which stands for 1/U_U. (YAML reads 0.5_2 as the number 0.52: write "
                "0.5_2.0.)"
            )
    elif lower is not None or upper <= 0:
        raise ConfigError(
            f"the rollout_rs_threshold of {name}, {threshold}, must be one number > 0: an upper bound of a divergence."
        )
    return Band(lower, upper)


def _numbers(threshold: float | str) -> tuple[float | None, float]:
    parts = str(threshold).strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(value >= 0 for value in numbers):
        raise ConfigError(
            f"threshold '{threshold}' is neither a number, such as 2.0, nor two with lo_hi, such as 0.5_2.0."
        )
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


# ---- ratios and weights -----------------------------------------------------------------------


def log_ratio_of(log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Δ = log π - log μ; (bsz, response_length) float64, 0 at masked positions, without gradient."""
    return zero_masked(log_prob.detach().double() - rollout_log_prob.detach().double(), response_mask)


def importance_ratio(log_ratio: Tensor, response_mask: Tensor, level: Level) -> Tensor:
    """The ratio π / μ of each token, or of the whole response repeated on each of its tokens.

        token       ρ_t = exp(clamp(Δ_t, ±20))
        sequence    exp(clamp(Σ_t Δ_t, ±20))

    From Δ, (bsz, response_length), to (bsz, response_length) float64, 1 at masked positions.
    """
    exponent = zero_masked(log_ratio.double(), response_mask)
    if level == "sequence":
        exponent = zero_masked(exponent.sum(-1, keepdim=True).expand_as(exponent), response_mask)
    return exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def importance_weights(ratio: Tensor, band: Band) -> Tensor:
    """Bound the ratios: min(ρ, C) with a cap; with a band, ρ inside and 0 outside.

    Capping keeps a token with a bounded weight (bias, little variance); the band drops it from the gradient, but
    not from the denominator of the loss. The band is that of :func:`parse_is_threshold`.
    """
    if band.lower is None:
        return ratio.clamp(max=band.upper)
    return torch.where(band.contains(ratio), ratio, torch.zeros_like(ratio))


def normalisation_factor(weights: Tensor, response_mask: Tensor, level: Level) -> Tensor:
    """The mean weight, over valid tokens or over responses that have one; 1 where that mean is 0.

    Dividing by it makes the weights of the batch average 1: self-normalised importance sampling. Tensors are (bsz,
    response_length), with the mask of the tokens that the loss will use; at level sequence the weights must be equal on
    all valid tokens of a response.
    """
    if level == "token":
        mean = masked_mean(weights, response_mask)
    else:
        mean = masked_mean(masked_mean(weights, response_mask, axis=-1), response_mask.bool().any(-1))
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def response_weights(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, settings: RolloutCorrectionConfig
) -> Tensor:
    """Bounded weights π/μ of ``rollout_is``, without rejection or normalisation: (bsz, response_length) float32.

    Each depends on its response alone, so that a loss on some rows has the weights of the whole batch, to the bit.
    """
    assert settings.rollout_is is not None
    log_ratio = log_ratio_of(log_prob, rollout_log_prob, response_mask)
    ratio = importance_ratio(log_ratio, response_mask, settings.rollout_is)
    return zero_masked(
        importance_weights(ratio, parse_is_threshold(settings.rollout_is_threshold)), response_mask
    ).float()


# ---- rejection --------------------------------------------------------------------------------


def rejection_statistic(log_ratio: Tensor, response_mask: Tensor, name: str) -> Tensor:
    """Compute the statistic ``name`` (of ``REJECTION_CRITERIA``) of Δ, (bsz, response_length), in float64.

    With k1 = Δ, k2 = ½Δ², k3 = e^Δ - 1 - Δ (k2 and k3 are at least 0; the mean of k3 under μ is KL(μ ‖ π),
    http://joschu.net/blog/kl-approx.html)::

        token_k1      e^{Δ_t}              token_k2, token_k3          k_t
        seq_sum_k1    e^{Σ_t Δ_t}          seq_sum_k2, seq_sum_k3      Σ_t k_t
        seq_mean_k1   e^{mean_t Δ_t}       seq_mean_k2, seq_mean_k3    mean_t k_t
                                           seq_max_k2, seq_max_k3      max_t k_t

    So k1 statistics are ratios (of a token, of the response, or their geometric mean over tokens), and equal 1
    where π and μ agree; the others are divergences and equal 0 there. Exponents are clamped to ±20. The statistic of a
    sequence is repeated on every position.
    """
    *_, reduction, kind = name.split("_")
    delta = zero_masked(log_ratio.double(), response_mask)
    if kind != "k1":
        delta = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        delta = 0.5 * delta**2 if kind == "k2" else delta.expm1() - delta
    if reduction == "sum":
        delta = delta.sum(-1, keepdim=True)
    elif reduction == "mean":
        delta = masked_mean(delta, response_mask, axis=-1).unsqueeze(-1)
    elif reduction == "max":  # masked places hold 0, and no k2 or k3 is smaller
        delta = delta.amax(-1, keepdim=True) if delta.shape[-1] else delta.sum(-1, keepdim=True)
    delta = delta.expand(log_ratio.shape)
    return delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() if kind == "k1" else delta


def accepted(log_ratio: Tensor, response_mask: Tensor, criteria: tuple[Criterion, ...]) -> Tensor:
    """Return where every criterion accepts, (bsz, response_length) bool; True also at masked positions of such rows."""
    is_accepted = torch.ones(log_ratio.shape, dtype=torch.bool, device=log_ratio.device)
    for criterion in criteria:
        is_accepted &= criterion.band.contains(rejection_statistic(log_ratio, response_mask, criterion.name))
    return is_accepted


def off_policy_sequence_mask(
    log_prob: Tensor, rollout_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, threshold: float
) -> Tensor:
    """Return where the policy loss stays, (bsz, response_length) bool: not on bad responses far from the policy.

        M_t = 0 where A_t < 0 and mean_t (log μ - log π) > δ, else 1

    The mean is over the tokens of the response. A model learns from its own mistakes; one that it would no longer make
    can only do harm. Good responses stay, however old.

    Paper: off-policy sequence masking of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 8 and 9.

    Args:
        log_prob: (bsz, response_length) of the current policy π.
        rollout_log_prob: (bsz, response_length) of the policy μ that drew the response, as the engine returned it.
        advantages: (bsz, response_length).
        response_mask: (bsz, response_length).
        threshold: δ, in nats per token.
    """
    distance = masked_mean(-log_ratio_of(log_prob, rollout_log_prob, response_mask), response_mask, axis=-1)
    return ~((advantages < 0) & (distance > threshold).unsqueeze(-1))


# ---- the proximal policy by interpolation ------------------------------------------------------


INTERPOLATED = ("rollout_log_probs", "updates_behind")
"""The columns from which :func:`interpolated_policy` makes the proximal policy."""


class ProximalPolicy(NamedTuple):
    """An interpolated proximal policy, and what corrects its samples; tensors are (bsz, response_length)."""

    log_probs: Tensor
    """log π_prox, in the dtype of the current policy's."""
    weights: Tensor | None
    """Bounded π_prox / π_b, 0 where rejected, in the same dtype; None if nothing weighs or rejects."""
    metrics: Mapping[str, Tensor]
    """Values of each token by the name of the metric, to be averaged; or extremes (``_max``, ``_min``)."""


def interpolation_factor(updates_behind: Tensor) -> Tensor:
    """The position α = d / (d + 1) of the proximal policy between the policy that drew a token and the current one.

    d counts the updates between the weights that drew the token and those before this step, whose update makes the
    current policy the (d + 1)-th. In versions, α = (v_prox - v_b) / (v_θ - v_b) with v_θ = v_prox + 1. So the weight of
    the policy that drew the token, 1 - α, is 1 / (d + 1): all at d = 0, where it is the proximal policy.

    From (bsz, response_length) integers to float64; negative values, of tokens that the policy did not draw, are as 0.
    """
    age = updates_behind.clamp(min=0).double()
    return age / (age + 1.0)


def interpolated_policy(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    updates_behind: Tensor,
    response_mask: Tensor,
    settings: RolloutCorrectionConfig,
) -> ProximalPolicy:
    """Approximate the policy at the start of the update by interpolation, as A-3PO does (arXiv:2512.06547).

        Δ = log π_θ - log π_b            log π_prox = log π_b + α Δ            α = d / (d + 1)
        loss:   s · sg[min(π_prox / π_b, C)] · L(π_θ / π_prox)

    L is any policy loss with π_prox as the old policy, the bounded weight is that of ``rollout_is``, and s is 1 where
    ``rollout_rs`` accepts, else 0; both read αΔ in place of Δ. Everything is per token or per response and a constant
    of the gradient, so it does not depend on micro-batches or ranks. Rejected tokens stay in the denominators.

    Args:
        log_prob: (bsz, response_length) of the current policy π_θ, as the update's own forward pass computes it.
        rollout_log_prob: (bsz, response_length) of the policy π_b that drew the token, whatever its version.
        updates_behind: (bsz, response_length) integers d; see :func:`interpolation_factor`.
        response_mask: (bsz, response_length).
        settings: thresholds, level of the weights, criteria of rejection.

    Raises:
        ConfigError: ``rollout_is_batch_normalize``, or an invalid threshold.
    """
    if settings.rollout_is_batch_normalize:
        raise ConfigError(
            "rollout_is_batch_normalize=true cannot be used with prox_logp_method=loglinear: the policy loss sees one "
            "micro-batch at a time, so the mean weight would depend on the layout. Set it to false, or "
            "prox_logp_method=recompute, which normalises over the batch of the step."
        )
    gap, alpha = log_ratio_of(log_prob, rollout_log_prob, response_mask), interpolation_factor(updates_behind)
    moved = alpha * gap
    proximal = zero_masked(rollout_log_prob.double(), response_mask) + moved
    metrics, weights = {**gap_metrics(gap), "rollout_corr/prox_alpha": alpha}, None
    if settings.rollout_is is not None:
        band = parse_is_threshold(settings.rollout_is_threshold)
        ratio = importance_ratio(moved, response_mask, settings.rollout_is)
        weights = importance_weights(ratio, band)
        metrics |= ratio_metrics(ratio, band)
    if settings.rollout_rs is not None:
        is_accepted = accepted(moved, response_mask, parse_criteria(settings.rollout_rs, settings.rollout_rs_threshold))
        weights = is_accepted.double() if weights is None else zero_masked(weights, is_accepted)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = (~is_accepted).double()
    dtype = log_prob.dtype
    return ProximalPolicy(proximal.to(dtype), None if weights is None else weights.to(dtype), metrics)


# ---- metrics of a loss that computes the ratios itself -----------------------------------------


def gap_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """KL by k1 and k3, and χ², of each token of Δ = log π_θ - log μ."""
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return {
        "rollout_corr/kl": -log_ratio,
        "rollout_corr/k3_kl": ratio - 1.0 - log_ratio,
        "rollout_corr/chi2_token": (2.0 * log_ratio).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() - 1.0,
    }


def ratio_metrics(ratio: Tensor, band: Band) -> dict[str, Tensor]:
    """The ratio of each token before it is bounded, and where it is outside of its bounds."""
    lower = 1.0 / band.upper if band.lower is None else band.lower
    return {
        "rollout_corr/rollout_is_mean": ratio,
        "rollout_corr/rollout_is_max": ratio,
        "rollout_corr/rollout_is_min": ratio,
        "rollout_corr/rollout_is_ratio_fraction_high": (ratio > band.upper).double(),
        "rollout_corr/rollout_is_ratio_fraction_low": (ratio < lower).double(),
    }
