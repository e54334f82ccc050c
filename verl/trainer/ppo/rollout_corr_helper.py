"""Rollout correction of a batch: importance weights, rejection, and off-policy metrics.

::

    decoupled   old_log_probs of the trainer, rollout_log_probs of the engine
                  ──► rollout_is_weights, response_mask without what was rejected
    bypass      old_log_probs := rollout_log_probs; the policy loss ``bypass_mode`` corrects

All functions run on the driver on the whole batch of a step, so that normalisation and metrics do not depend on the
number of ranks. The formulas are in ``verl/algorithms/rollout_correction.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from omegaconf import DictConfig, open_dict
from torch import Tensor

from verl.algorithms.rollout_correction import (
    LOG_RATIO_BOUND,
    REJECTION_CRITERIA,
    Band,
    Level,
    importance_ratio,
    importance_weights,
    log_ratio_of,
    normalisation_factor,
    parse_criteria,
    parse_is_threshold,
    rejection_statistic,
)
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.schema import require
from verl.utils.metric import Metrics
from verl.utils.torch_functional import masked_mean, zero_masked

if TYPE_CHECKING:
    from verl.config import RolloutCorrectionConfig

SAFETY_BOUND = LOG_RATIO_BOUND
"""Log-ratios are clamped to ± this value before exp."""
SUPPORTED_ROLLOUT_RS_OPTIONS = REJECTION_CRITERIA
"""The criteria accepted in ``rollout_rs``."""

PREFIX = "rollout_corr/"


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: RolloutCorrectionConfig
) -> tuple[DataProto, Metrics]:
    """Apply the decoupled correction to a batch, in place.

    It gets ``rollout_is_weights`` if ``rollout_is`` is set, and ``response_mask`` becomes 0 on tokens rejected by
    ``rollout_rs``. For arguments and errors see :func:`corrected_columns`.

    Returns:
        the same batch, and the metrics.
    """
    columns, metrics = corrected_columns(batch, rollout_corr_config)
    for name, column in columns.batch.items():
        batch.batch[name] = column
    return batch, metrics


def corrected_columns(batch: DataProto, rollout_corr_config: RolloutCorrectionConfig) -> tuple[DataProto, Metrics]:
    """Compute the columns of the decoupled correction.

    Args:
        batch: with old_log_probs, rollout_log_probs, response_mask; unchanged.
        rollout_corr_config: ``algorithm.rollout_correction``.

    Returns:
        ``response_mask`` without rejected tokens, and ``rollout_is_weights`` if ``rollout_is`` is set; and the metrics
        of :func:`compute_rollout_correction_and_rejection_mask`.

    Raises:
        SchemaError: a column is missing.
    """
    require(batch, ("old_log_probs", "rollout_log_probs", "response_mask"), "the rollout correction")
    columns, config = _columns(batch), rollout_corr_config
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        columns["response_mask"],
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    corrected = DataProto.from_dict(tensors={"response_mask": mask})
    return corrected if weights is None else corrected | weights, metrics


def apply_bypass_mode(
    batch: DataProto,
    rollout_corr_config: RolloutCorrectionConfig | DictConfig | None = None,
    policy_loss_config: DictConfig | None = None,
) -> None:
    """Make the rollout's log-probs the ``old_log_probs`` of a batch, in place, for the policy loss ``bypass_mode``.

    Args:
        batch: with rollout_log_probs.
        rollout_corr_config: ``algorithm.rollout_correction``, for ``policy_loss_config``.
        policy_loss_config: a section ``policy_loss`` that is to say the same: it gets the loss mode and the correction.
            Workers that exist already keep the settings with which they were made.

    Raises:
        SchemaError: the rollout engine returned no log-probs.
    """
    require(batch, ("rollout_log_probs",), "the bypass mode (algorithm.rollout_correction.bypass_mode=true)")
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
    if policy_loss_config is not None:
        with open_dict(policy_loss_config):
            policy_loss_config["loss_mode"] = "bypass_mode"
            if rollout_corr_config is not None:
                policy_loss_config["rollout_correction"] = dict(rollout_corr_config)


apply_rollout_correction = apply_bypass_mode
"""Older name of :func:`apply_bypass_mode`, used by existing scripts."""


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: Level | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[DataProto | None, Tensor, Metrics]:
    """Compute importance weights, rejection mask and all their metrics.

    Weights are normalised over the tokens that are left after the rejection.

    Args:
        old_log_prob: (bsz, response_length) log-probs of the policy at the start of the update.
        rollout_log_prob: (bsz, response_length) log-probs of the sampling distribution.
        response_mask: (bsz, response_length) 1 on tokens sampled from the policy.
        rollout_is: weights per ``token`` or per ``sequence``, or None.
        rollout_is_threshold: cap or band; see :func:`compute_rollout_correction_weights`.
        rollout_is_batch_normalize: divide the weights by their mean.
        rollout_rs: comma-separated criteria, or None.
        rollout_rs_threshold: their thresholds; see :func:`compute_rollout_rejection_mask`.

    Returns:
        a batch with ``rollout_is_weights`` (bsz, response_length) float32, or None; a new response mask without the
        rejected tokens; and metrics under ``rollout_corr/``: those of :func:`compute_offpolicy_metrics`,
        :func:`compute_rollout_correction_weights` and :func:`compute_rollout_rejection_mask`.

    Raises:
        ConfigError: a threshold or a criterion is invalid.
    """
    log_ratio = log_ratio_of(old_log_prob, rollout_log_prob, response_mask)
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    mask, weights = response_mask.clone(), None
    if rollout_rs is not None:
        mask, computed = compute_rollout_rejection_mask(log_ratio, response_mask, rollout_rs, rollout_rs_threshold)
        metrics |= computed
    if rollout_is is not None:
        tensor, computed = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize, mask
        )
        metrics |= computed
        weights = DataProto.from_dict(tensors={"rollout_is_weights": tensor})
    return weights, mask, {PREFIX + name: value for name, value in metrics.items()}


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: Level = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    accepted_mask: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute importance weights π/μ, bounded and optionally normalised.

        w = min(ρ, C)                        rollout_is_threshold = C
        w = ρ where lo ≤ ρ ≤ hi, else 0      rollout_is_threshold = "lo_hi" (IcePop, arXiv:2510.18855)
        w ← w / mean(w)                      rollout_is_batch_normalize

    where ρ is the ratio of the token or of the whole response. With u the valid tokens (or responses), the metrics
    are::

        rollout_is_{mean,std,min,max}               of ρ over u, before it is bounded
        rollout_is_ratio_fraction_{high,low}        share of u with ρ > C or hi; with ρ < 1/C or lo
        rollout_is_eff_sample_size                  (mean w)² / mean w² over u: 1 for equal weights, 0 if all are 0
        rollout_is_seq_{mean,std,min,max}           of ρ̄ = mean_t ρ over responses
        rollout_is_seq_max_deviation                max |ρ̄ - 1|
        rollout_is_seq_fraction_{high,low}          as above, of ρ̄
        rollout_is_batch_norm_factor                mean(w), with rollout_is_batch_normalize

    Without a valid token, moments, extremes and fractions are absent.

    Args:
        log_ratio: (bsz, response_length) log π - log μ.
        response_mask: (bsz, response_length).
        rollout_is: ``token`` or ``sequence``.
        rollout_is_threshold: C, or ``"lo_hi"``.
        rollout_is_batch_normalize: divide by the mean over tokens (or over responses).
        accepted_mask: (bsz, response_length) tokens of that mean; None for ``response_mask``.

    Returns:
        weights (bsz, response_length) float32, 0 at masked positions; metrics without the prefix ``rollout_corr/``.

    Raises:
        ConfigError: the level or the threshold is invalid.
    """
    if rollout_is not in get_args(Level):
        raise ConfigError(f"rollout_is={rollout_is!r} is no level of weights. Use token or sequence.")
    band = parse_is_threshold(rollout_is_threshold)
    ratio = importance_ratio(log_ratio, response_mask, rollout_is)
    weights = importance_weights(ratio, band)
    metrics = _ratio_metrics(ratio, response_mask, rollout_is, band)
    metrics["rollout_is_eff_sample_size"] = _effective_sample_size(_units(weights, response_mask, rollout_is))
    if rollout_is_batch_normalize:
        mask = response_mask if accepted_mask is None else accepted_mask
        factor = normalisation_factor(weights, mask, rollout_is)
        weights, metrics["rollout_is_batch_norm_factor"] = weights / factor, factor.item()
    return zero_masked(weights, response_mask).float(), metrics


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[Tensor, Metrics]:
    """Mask tokens or responses on which π and μ differ too much.

    A criterion rejects a token, or a whole response, if its statistic
    (:func:`verl.algorithms.rollout_correction.rejection_statistic`) is outside of its threshold. Metrics::

        rollout_rs_{criterion}_{mean,std,min,max}             of the statistic, over tokens (or responses)
        rollout_rs_{criterion}_fraction_{high,low}            above its bound; k1: below the lower end of its band
        rollout_rs_{criterion}_seq_{mean,std,min,max}         of its mean over each response
        rollout_rs_{criterion}_seq_max_deviation              k1: max |that - 1|
        rollout_rs_{criterion}_seq_fraction_{high,low}        as above, of that
        rollout_rs_{criterion}_masked_fraction                share of valid tokens that it rejects
        rollout_rs_{criterion}_seq_masked_fraction            share of responses with a rejected token
        rollout_rs_masked_fraction, rollout_rs_seq_masked_fraction    the same for all criteria together

    If everything is rejected, ``rollout_rs_masked_fraction`` is 1, and loss and gradient are zero.

    Args:
        log_ratio: (bsz, response_length) log π - log μ.
        response_mask: (bsz, response_length).
        rollout_rs: comma-separated criteria; a token is kept if all of them accept it.
        rollout_rs_threshold: one threshold for each criterion in the same order, or one for all.

    Returns:
        a new mask with the dtype of ``response_mask``; metrics without the prefix ``rollout_corr/``.

    Raises:
        ConfigError: a criterion is unknown, or a threshold is invalid.
    """
    accepted, metrics = response_mask.bool(), {}
    for criterion in parse_criteria(rollout_rs, rollout_rs_threshold):
        name, band = criterion
        statistic = rejection_statistic(log_ratio, response_mask, name)
        inside = band.contains(statistic)
        criterion_metrics = _band_metrics(statistic, response_mask, criterion.level, band)
        criterion_metrics |= _masked_metrics(~inside, response_mask)
        if name.endswith("k1"):
            criterion_metrics["seq_max_deviation"] = _max_deviation(statistic, response_mask)
        metrics |= {f"rollout_rs_{name}_{key}": value for key, value in criterion_metrics.items()}
        accepted = accepted & inside
    metrics |= {f"rollout_rs_{key}": value for key, value in _masked_metrics(~accepted, response_mask).items()}
    return response_mask * accepted.to(response_mask.dtype), metrics


def compute_offpolicy_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor) -> Metrics:
    """Measure the distance of the policy π (``old_log_prob``) from the sampling distribution μ (``rollout_log_prob``).

    With Δ = log π - log μ on valid tokens, and L_π = -mean_t log π, L_μ of each response::

        training_ppl, training_log_ppl       mean of e^{L_π}, and of L_π, over responses
        rollout_ppl, rollout_log_ppl         the same for μ
        kl                                   mean of -Δ over tokens: KL(μ ‖ π) by k1
        k3_kl                                mean of e^Δ - Δ - 1 over tokens: KL(μ ‖ π) by k3
        log_ppl_diff                         mean of L_π - L_μ over responses; > 0 if samples are less likely under π
        log_ppl_{abs_diff,diff_max,diff_min} mean absolute value, maximum and minimum of L_π - L_μ
        ppl_ratio                            mean of e^{L_π - L_μ}
        chi2_token                           mean of e^{2Δ} over tokens - 1: χ²(π ‖ μ) of a token
        chi2_seq                             mean of e^{2ΣΔ} over responses - 1: χ²(π ‖ μ) of a response

    Exponents are clamped to ±20. Responses without a valid token do not count.

    Args:
        old_log_prob: (bsz, response_length).
        rollout_log_prob: (bsz, response_length), or None if the engine returned none.
        response_mask: (bsz, response_length).

    Returns:
        metrics without the prefix ``rollout_corr/``; only those of π if ``rollout_log_prob`` is None, and none
        without a valid token.
    """
    there = response_mask.bool().any(-1)
    if not there.any():
        return {}
    training = _log_perplexity(old_log_prob, response_mask)[there]
    metrics = {"training_ppl": _exp(training).mean().item(), "training_log_ppl": training.mean().item()}
    if rollout_log_prob is None:
        return metrics
    delta = log_ratio_of(old_log_prob, rollout_log_prob, response_mask)
    rollout, tokens = _log_perplexity(rollout_log_prob, response_mask)[there], delta[response_mask.bool()]
    gap = training - rollout
    return metrics | {
        "rollout_ppl": _exp(rollout).mean().item(),
        "rollout_log_ppl": rollout.mean().item(),
        "kl": -tokens.mean().item(),
        "k3_kl": (tokens.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1() - tokens).mean().item(),
        "log_ppl_diff": gap.mean().item(),
        "log_ppl_abs_diff": gap.abs().mean().item(),
        "log_ppl_diff_max": gap.max().item(),
        "log_ppl_diff_min": gap.min().item(),
        "ppl_ratio": _exp(gap).mean().item(),
        "chi2_token": _exp(2.0 * tokens).mean().item() - 1.0,
        "chi2_seq": _exp(2.0 * delta.sum(-1)[there]).mean().item() - 1.0,
    }


# ---- helpers ----------------------------------------------------------------------------------


def _columns(batch: DataProto) -> dict[str, Tensor]:
    if not batch.batch.keys():
        raise SchemaError("the rollout correction needs a batch with tensor columns; this one has none.")
    return dict(batch.batch.items())


def _exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _log_perplexity(log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """-mean_t log p of each response; (bsz,) float64."""
    return -masked_mean(log_prob.detach().double(), response_mask, axis=-1)


def _units(values: Tensor, response_mask: Tensor, level: Level) -> Tensor:
    """One value for each valid token, or the mean over the tokens of each response that has one."""
    mask = response_mask.bool()
    return values[mask] if level == "token" else masked_mean(values, mask, axis=-1)[mask.any(-1)]


def _ratio_metrics(ratio: Tensor, response_mask: Tensor, level: Level, band: Band) -> Metrics:
    two_sided = band if band.lower is not None else Band(1.0 / band.upper, band.upper)
    values = _band_metrics(ratio, response_mask, level, two_sided)
    renamed = {"fraction_high": "ratio_fraction_high", "fraction_low": "ratio_fraction_low"}
    metrics = {f"rollout_is_{renamed.get(name, name)}": value for name, value in values.items()}
    metrics["rollout_is_seq_max_deviation"] = _max_deviation(ratio, response_mask)
    return metrics


def _band_metrics(values: Tensor, response_mask: Tensor, level: Level, band: Band) -> Metrics:
    """Moments, extremes and shares outside of the band, over units of ``level`` and (``seq_*``) over responses."""
    levels: dict[str, Level] = {"": level, "seq_": "sequence"}
    metrics: Metrics = {}
    for prefix, over in levels.items():
        units = _units(values, response_mask, over)
        if len(units) == 0:
            continue
        metrics |= {
            f"{prefix}mean": units.mean().item(),
            f"{prefix}std": units.std(correction=0).item(),
            f"{prefix}min": units.min().item(),
            f"{prefix}max": units.max().item(),
            f"{prefix}fraction_high": (units > band.upper).double().mean().item(),
        }
        if band.lower is not None:
            metrics[f"{prefix}fraction_low"] = (units < band.lower).double().mean().item()
    return metrics


def _max_deviation(ratio: Tensor, response_mask: Tensor) -> float:
    units = _units(ratio, response_mask, "sequence")
    return (units - 1.0).abs().max().item() if len(units) else 0.0


def _effective_sample_size(weights: Tensor) -> float:
    squares = (weights**2).sum()
    return (weights.sum() ** 2 / (len(weights) * squares)).item() if squares > 0 else 0.0


def _masked_metrics(rejected: Tensor, response_mask: Tensor) -> Metrics:
    mask = response_mask.bool()
    rows = mask.any(-1)
    return {
        "masked_fraction": masked_mean(rejected.double(), mask).item(),
        "seq_masked_fraction": masked_mean((rejected & mask).any(-1).double(), rows).item(),
    }
