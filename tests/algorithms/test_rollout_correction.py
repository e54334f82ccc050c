"""Weights, rejection and metrics of the rollout correction: by hand, slow oracles, reductions, masks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor, tensor
from torch.testing import assert_close

from verl.algorithms.rollout_correction import (
    REJECTION_CRITERIA,
    Band,
    Level,
    accepted,
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
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import rollout_corr_helper as helper
from verl.trainer.ppo.rollout_corr_helper import (
    apply_bypass_mode,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    corrected_columns,
)

F64 = torch.float64
LEVELS: tuple[Level, ...] = ("token", "sequence")
LOG2 = math.log(2.0)

# Ratios of two responses: 2, ½, 4 (the fourth place is masked), and 1, ¼ (two places are masked).
RATIOS = [[2.0, 0.5, 4.0, 9.0], [1.0, 0.25, 9.0, 9.0]]
DELTA = tensor(RATIOS, dtype=F64).log()
MASK = tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def approx(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


# ---- settings


def test_thresholds_of_weights():
    assert parse_is_threshold(2.0) == parse_is_threshold("2") == Band(None, 2.0)
    assert parse_is_threshold("0.5_5.0") == Band(0.5, 5.0)
    assert parse_is_threshold("0.0_3.0") == Band(0.0, 3.0)
    assert parse_is_threshold(math.inf) == Band(None, math.inf)


@pytest.mark.parametrize("threshold", [0.5, "0.55", "2.0_5.0", "0.5_0.9"])
def test_a_threshold_must_keep_agreement(threshold: float | str):
    with pytest.raises(ConfigError, match="a token on which rollout and trainer agree has the ratio 1"):
        parse_is_threshold(threshold)


@pytest.mark.parametrize("threshold", ["", "a", "1_2_3", "0.5-2.0", "nan", "-1"])
def test_a_threshold_that_is_no_number(threshold: str):
    with pytest.raises(ConfigError, match="is neither a number"):
        parse_is_threshold(threshold)


def test_criteria_and_their_thresholds():
    assert parse_criteria("seq_mean_k1, seq_max_k2", "0.999_1.001,0.5") == (
        ("seq_mean_k1", Band(0.999, 1.001)),
        ("seq_max_k2", Band(None, 0.5)),
    )
    assert parse_criteria("token_k1", 4.0) == (("token_k1", Band(0.25, 4.0)),)  # U stands for [1/U, U]
    assert parse_criteria("token_k2,token_k3", 0.5) == (("token_k2", Band(None, 0.5)), ("token_k3", Band(None, 0.5)))
    assert [c.level for c in parse_criteria("token_k1,seq_sum_k1", "2,3")] == ["token", "sequence"]


@pytest.mark.parametrize(
    ("criteria", "thresholds", "said"),
    [
        ("token_k4", 1.0, "there is no criterion 'token_k4'. Did you mean 'token_k"),
        ("seq_max_k1", 1.0, "there is no criterion 'seq_max_k1'"),
        ("token_k1,,token_k2", 1.0, "there is no criterion ''"),
        ("token_k1,token_k1", 2.0, "names a criterion twice"),
        ("token_k1", None, "needs rollout_rs_threshold"),
        ("token_k1,token_k2,token_k3", "2.0,1.0", "has 2 thresholds, and rollout_rs=token_k1,token_k2,token_k3 has 3"),
        ("token_k1", 0.52, "must be a band of ratios around 1.*YAML reads 0.5_2 as the number 0.52"),
        ("token_k1", "1.5_2.0", "must be a band of ratios around 1"),
        ("token_k2", "0.5_2.0", "must be one number > 0"),
        ("token_k3", 0.0, "must be one number > 0"),
    ],
)
def test_criteria_that_cannot_be_used(criteria: str, thresholds: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        parse_criteria(criteria, thresholds)


# ---- weights


@pytest.mark.proof("by hand", "token", "sequence")
def test_ratios_by_hand():
    # Products: 2·½·4 = 4 and 1·¼.
    assert_close(
        importance_ratio(DELTA, MASK, "token"), tensor([[2.0, 0.5, 4.0, 1.0], [1.0, 0.25, 1.0, 1.0]], dtype=F64)
    )
    assert_close(
        importance_ratio(DELTA, MASK, "sequence"), tensor([[4.0, 4.0, 4.0, 1.0], [0.25, 0.25, 1.0, 1.0]], dtype=F64)
    )


@pytest.mark.proof("by hand", "token")
def test_weights_by_hand():
    weights, metrics = compute_rollout_correction_weights(DELTA, MASK, "token", 3.0)
    assert_close(weights, tensor([[2.0, 0.5, 3.0, 0.0], [1.0, 0.25, 0.0, 0.0]]))
    # Ratios 2 ½ 4 1 ¼: mean 1.55, variance (.2025+1.1025+6.0025+.3025+1.69)/5 = 1.86.
    # Of the responses (2+½+4)/3 = 13/6 and 5/8. Weights 2 ½ 3 1 ¼: sum 6.75, squares 4+.25+9+1+.0625 = 14.3125.
    responses = [13 / 6, 5 / 8]
    assert metrics == approx(
        {
            "rollout_is_mean": 1.55,
            "rollout_is_std": math.sqrt(1.86),
            "rollout_is_min": 0.25,
            "rollout_is_max": 4.0,
            "rollout_is_ratio_fraction_high": 1 / 5,  # 4 > 3
            "rollout_is_ratio_fraction_low": 1 / 5,  # ¼ < ⅓
            "rollout_is_eff_sample_size": 6.75**2 / (5 * 14.3125),
            "rollout_is_seq_mean": sum(responses) / 2,
            "rollout_is_seq_std": (responses[0] - responses[1]) / 2,
            "rollout_is_seq_min": 5 / 8,
            "rollout_is_seq_max": 13 / 6,
            "rollout_is_seq_max_deviation": 13 / 6 - 1,
            "rollout_is_seq_fraction_high": 0.0,
            "rollout_is_seq_fraction_low": 0.0,
        }
    )


@pytest.mark.proof("by hand", "sequence")
def test_sequence_weights_by_hand():
    weights, metrics = compute_rollout_correction_weights(DELTA, MASK, "sequence", 3.0)
    assert_close(weights, tensor([[3.0, 3.0, 3.0, 0.0], [0.25, 0.25, 0.0, 0.0]]))
    assert metrics["rollout_is_mean"] == metrics["rollout_is_seq_mean"] == approx((4 + 0.25) / 2)
    assert (metrics["rollout_is_min"], metrics["rollout_is_max"]) == approx((0.25, 4.0))
    assert metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_ratio_fraction_low"] == 0.5
    assert metrics["rollout_is_eff_sample_size"] == approx(3.25**2 / (2 * (9 + 0.0625)))
    assert metrics["rollout_is_seq_max_deviation"] == approx(3.0)


@pytest.mark.proof("by hand", "token", "sequence")
def test_icepop_by_hand():
    weights, metrics = compute_rollout_correction_weights(DELTA, MASK, "token", "0.5_2.0")  # both ends belong to it
    assert_close(weights, tensor([[2.0, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]))
    assert metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_ratio_fraction_low"] == approx(1 / 5)
    assert metrics["rollout_is_eff_sample_size"] == approx(3.5**2 / (5 * 5.25))
    whole, _ = compute_rollout_correction_weights(DELTA, MASK, "sequence", "0.25_3.0")
    assert_close(whole, tensor([[0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.0, 0.0]]))


@pytest.mark.proof("by hand", "token", "sequence")
def test_normalised_weights_by_hand():
    weights, metrics = compute_rollout_correction_weights(DELTA, MASK, "token", 3.0, True)
    assert metrics["rollout_is_batch_norm_factor"] == approx(1.35)  # 6.75 / 5
    assert_close(weights[0], tensor([2.0, 0.5, 3.0, 0.0]) / 1.35)
    assert weights.sum().item() / 5 == pytest.approx(1.0, rel=1e-6)
    weights, metrics = compute_rollout_correction_weights(DELTA, MASK, "sequence", 3.0, True)
    assert metrics["rollout_is_batch_norm_factor"] == approx(3.25 / 2)  # over responses, however long
    assert (weights[0, 0] + weights[1, 0]).item() / 2 == pytest.approx(1.0, rel=1e-6)


def test_the_mean_is_over_what_is_left_after_rejection():
    result = correct([DELTA], rollout_is="token", rollout_is_threshold=3.0, rollout_is_batch_normalize=True,
                     rollout_rs="token_k1", rollout_rs_threshold="0.3_3.0")  # fmt: skip
    # 4 and ¼ are rejected; the mean of 2 ½ 1 is 3.5/3.
    assert result.metrics["rollout_corr/rollout_is_batch_norm_factor"] == approx(3.5 / 3)
    assert (result.weights * result.mask).sum().item() / 3 == pytest.approx(1.0, rel=1e-6)


def test_no_weight_at_all_is_not_divided_by():
    far = tensor([[5.0, -5.0]], dtype=F64)
    weights, metrics = compute_rollout_correction_weights(far, tensor([[1, 1]]), "token", "0.5_2.0", True)
    assert weights.tolist() == [[0.0, 0.0]]
    assert metrics["rollout_is_batch_norm_factor"] == 1.0
    assert metrics["rollout_is_eff_sample_size"] == 0.0


# ---- rejection

# k2 = ½Δ² and k3 = e^Δ - 1 - Δ of the ratios 2 ½ 4 and 1 ¼, with Δ in units of log 2: 1 -1 2 and 0 -2.
K2 = [[LOG2**2 / 2, LOG2**2 / 2, 2 * LOG2**2], [0.0, 2 * LOG2**2]]
K3 = [[1 - LOG2, LOG2 - 0.5, 3 - 2 * LOG2], [0.0, 2 * LOG2 - 0.75]]
STATISTICS = {
    "token_k1": [[2.0, 0.5, 4.0], [1.0, 0.25]],
    "token_k2": K2,
    "token_k3": K3,
    "seq_sum_k1": [4.0, 0.25],
    "seq_sum_k2": [3 * LOG2**2, 2 * LOG2**2],
    "seq_sum_k3": [3.5 - 2 * LOG2, 2 * LOG2 - 0.75],
    "seq_mean_k1": [4.0 ** (1 / 3), 0.5],
    "seq_mean_k2": [LOG2**2, LOG2**2],
    "seq_mean_k3": [(3.5 - 2 * LOG2) / 3, (2 * LOG2 - 0.75) / 2],
    "seq_max_k2": [2 * LOG2**2, 2 * LOG2**2],
    "seq_max_k3": [3 - 2 * LOG2, 2 * LOG2 - 0.75],
}


def test_every_criterion_is_worked_by_hand():
    assert STATISTICS.keys() == set(REJECTION_CRITERIA)


@pytest.mark.proof("by hand", param="name")
@pytest.mark.parametrize("name", REJECTION_CRITERIA)
def test_statistics_by_hand(name: str):
    found, expected = rejection_statistic(DELTA, MASK, name), STATISTICS[name]
    assert found.shape == DELTA.shape
    for row, length in enumerate((3, 2)):
        values = expected[row] if isinstance(expected[row], list) else [expected[row]] * length
        assert found[row, :length].tolist() == approx(values)


@pytest.mark.proof("by hand", param="name")
@pytest.mark.parametrize("name", REJECTION_CRITERIA)
def test_each_criterion_rejects_what_is_outside_of_its_threshold(name: str):
    """A threshold between the two largest values rejects exactly the largest."""
    flat = sorted({x for row in STATISTICS[name] for x in (row if isinstance(row, list) else [row])})
    if len(flat) == 1 or math.isclose(flat[-1], flat[-2]):
        threshold, rejected = flat[-1] * 0.99, lambda x: True
    else:
        threshold, rejected = (flat[-1] + flat[-2]) / 2, lambda x: math.isclose(x, flat[-1])
    text = f"0.001_{threshold}" if name.endswith("k1") else threshold
    mask, metrics = compute_rollout_rejection_mask(DELTA, MASK, name, text)
    expected = []
    for row, length in enumerate((3, 2)):
        value = STATISTICS[name][row]
        values = value if isinstance(value, list) else [value] * length
        expected.append([0 if rejected(x) and x == max(values) else 1 for x in values])
        if name.startswith("seq"):
            expected[-1] = [0 if rejected(x) else 1 for x in values]
    if name == "token_k2":  # 2·log²2 comes up in both responses
        expected = [[1, 1, 0], [1, 0]]
    assert [mask[0, :3].tolist(), mask[1, :2].tolist()] == expected
    assert mask[MASK == 0].sum() == 0
    assert mask.dtype == MASK.dtype
    gone = 5 - sum(map(sum, expected))
    assert metrics["rollout_rs_masked_fraction"] == metrics[f"rollout_rs_{name}_masked_fraction"] == approx(gone / 5)
    rows = sum(0 in row for row in expected) / 2
    assert metrics["rollout_rs_seq_masked_fraction"] == metrics[f"rollout_rs_{name}_seq_masked_fraction"] == rows


def test_the_lower_end_of_a_band_rejects_too():
    mask, metrics = compute_rollout_rejection_mask(DELTA, MASK, "token_k1", "0.5_3.0")
    assert mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]  # 4 is above, ¼ below
    assert metrics["rollout_rs_token_k1_fraction_high"] == metrics["rollout_rs_token_k1_fraction_low"] == approx(0.2)
    # U = 2 is [½, 2]: the geometric mean 4^⅓ = 1.59 is inside, and so is ½.
    assert compute_rollout_rejection_mask(DELTA, MASK, "seq_mean_k1", 2.0)[0].tolist() == MASK.tolist()


def test_rejection_metrics_by_hand():
    _, metrics = compute_rollout_rejection_mask(DELTA, MASK, "token_k1", "0.5_3.0")
    assert metrics == approx(
        {
            "rollout_rs_token_k1_mean": 1.55,
            "rollout_rs_token_k1_std": math.sqrt(1.86),
            "rollout_rs_token_k1_min": 0.25,
            "rollout_rs_token_k1_max": 4.0,
            "rollout_rs_token_k1_fraction_high": 0.2,
            "rollout_rs_token_k1_fraction_low": 0.2,
            "rollout_rs_token_k1_seq_mean": (13 / 6 + 5 / 8) / 2,
            "rollout_rs_token_k1_seq_std": (13 / 6 - 5 / 8) / 2,
            "rollout_rs_token_k1_seq_min": 5 / 8,
            "rollout_rs_token_k1_seq_max": 13 / 6,
            "rollout_rs_token_k1_seq_max_deviation": 13 / 6 - 1,
            "rollout_rs_token_k1_seq_fraction_high": 0.0,
            "rollout_rs_token_k1_seq_fraction_low": 0.0,
            "rollout_rs_token_k1_masked_fraction": 0.4,
            "rollout_rs_token_k1_seq_masked_fraction": 1.0,
            "rollout_rs_masked_fraction": 0.4,
            "rollout_rs_seq_masked_fraction": 1.0,
        }
    )
    _, metrics = compute_rollout_rejection_mask(DELTA, MASK, "seq_max_k3", 1.0)
    k3 = STATISTICS["seq_max_k3"]  # 1.61 and 0.64
    assert metrics == approx(
        {f"rollout_rs_seq_max_k3_{p}{k}": v for p in ("", "seq_") for k, v in (
            ("mean", sum(k3) / 2), ("std", (k3[0] - k3[1]) / 2), ("min", k3[1]), ("max", k3[0]), ("fraction_high", 0.5),
        )}
        | {f"rollout_rs_{c}{k}": v for c in ("seq_max_k3_", "") for k, v in (
            ("masked_fraction", 3 / 5), ("seq_masked_fraction", 0.5),
        )}
    )  # fmt: skip


def test_several_criteria_all_have_to_accept():
    mask, metrics = compute_rollout_rejection_mask(DELTA, MASK, "token_k1,seq_sum_k1", "0.3_3.0,0.5_5.0")
    assert mask.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert metrics["rollout_rs_token_k1_masked_fraction"] == approx(2 / 5)
    assert metrics["rollout_rs_seq_sum_k1_masked_fraction"] == approx(2 / 5)
    assert metrics["rollout_rs_masked_fraction"] == approx(3 / 5)  # one token is rejected by both


def test_everything_rejected_is_finite_and_said():
    far = tensor([[9.0, -9.0], [3.0, 3.0]], dtype=F64)
    mask, metrics = compute_rollout_rejection_mask(far, torch.ones(2, 2), "token_k2", 0.01)
    assert mask.sum() == 0
    assert metrics["rollout_rs_masked_fraction"] == metrics["rollout_rs_seq_masked_fraction"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


# ---- slow oracles

OLD, ROLLOUT = st.floats(-6, 0), st.floats(-6, 0)
ROWS = st.lists(st.lists(st.tuples(OLD, ROLLOUT, st.booleans()), min_size=4, max_size=4), min_size=1, max_size=4)


def columns_of(rows: list) -> tuple[Tensor, Tensor, Tensor]:
    old, rollout, mask = (tensor([[token[i] for token in row] for row in rows], dtype=F64) for i in range(3))
    return old, rollout, mask.long()


def valid_of(rows: list) -> list[list[tuple[float, float]]]:
    return [[(o, r) for o, r, m in row if m] for row in rows]


@pytest.mark.proof("oracle", param="level")
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(rows=ROWS, bounds=st.sampled_from([2.0, math.inf, "0.5_5.0"]))
def test_weights_against_the_slow_form(level: Level, rows: list, bounds: float | str):
    old, rollout, mask = columns_of(rows)
    weights, _ = compute_rollout_correction_weights(log_ratio_of(old, rollout, mask), mask, level, bounds)
    for row, found in zip(rows, weights.tolist(), strict=True):
        product = math.exp(max(-20.0, min(20.0, sum(o - r for o, r, m in row if m))))
        for (o, r, m), weight in zip(row, found, strict=True):
            ratio = math.exp(o - r) if level == "token" else product
            inside = ratio if 0.5 <= ratio <= 5.0 else 0.0
            expected = inside if isinstance(bounds, str) else min(ratio, bounds)
            assert weight == pytest.approx(expected if m else 0.0, rel=1e-6)


def slow_statistic(pairs: list[tuple[float, float]], name: str) -> list[float]:
    kinds = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(d) - 1 - d,
    }
    *_, reduction, kind = name.split("_")
    values = [kinds[kind](o - r) for o, r in pairs]
    if reduction != "token":
        value = {"sum": sum, "mean": lambda x: sum(x) / len(x), "max": max}[reduction](values) if values else 0.0
        values = [value] * len(values)
    return [math.exp(max(-20.0, min(20.0, v))) for v in values] if kind == "k1" else values


@pytest.mark.proof("oracle", param="name")
@pytest.mark.parametrize("name", REJECTION_CRITERIA)
@settings(max_examples=25, deadline=None)
@given(rows=ROWS)
def test_rejection_against_the_slow_form(name: str, rows: list):
    old, rollout, mask = columns_of(rows)
    threshold = 1.7
    kept, _ = compute_rollout_rejection_mask(log_ratio_of(old, rollout, mask), mask, name, threshold)
    for pairs, row_kept, row_mask in zip(valid_of(rows), kept.tolist(), mask.tolist(), strict=True):
        found = [k for k, m in zip(row_kept, row_mask, strict=True) if m]
        for value, is_kept in zip(slow_statistic(pairs, name), found, strict=True):
            inside = value <= threshold and (not name.endswith("k1") or value >= 1 / threshold)
            on_the_edge = any(math.isclose(value, edge, rel_tol=1e-9) for edge in (threshold, 1 / threshold))
            assert on_the_edge or is_kept == int(inside)
        assert all(k == 0 for k, m in zip(row_kept, row_mask, strict=True) if not m)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_offpolicy_metrics_against_the_slow_form(rows: list):
    old, rollout, mask = columns_of(rows)
    found = compute_offpolicy_metrics(old, rollout, mask)
    responses = [pairs for pairs in valid_of(rows) if pairs]
    if not responses:
        assert found == {}
        return
    own = np.array([-np.mean([o for o, _ in pairs]) for pairs in responses])
    theirs = np.array([-np.mean([r for _, r in pairs]) for pairs in responses])
    delta = np.array([o - r for pairs in responses for o, r in pairs])
    sums = np.array([sum(o - r for o, r in pairs) for pairs in responses])
    expected = {
        "training_ppl": np.exp(own).mean(),
        "training_log_ppl": own.mean(),
        "rollout_ppl": np.exp(theirs).mean(),
        "rollout_log_ppl": theirs.mean(),
        "kl": -delta.mean(),
        "k3_kl": (np.exp(delta) - delta - 1).mean(),
        "log_ppl_diff": (own - theirs).mean(),
        "log_ppl_abs_diff": np.abs(own - theirs).mean(),
        "log_ppl_diff_max": (own - theirs).max(),
        "log_ppl_diff_min": (own - theirs).min(),
        "ppl_ratio": np.exp(own - theirs).mean(),
        "chi2_token": np.exp(2 * delta).mean() - 1,
        "chi2_seq": np.exp(np.clip(2 * sums, -20, 20)).mean() - 1,
    }
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


# ---- metrics by hand


def test_offpolicy_metrics_by_hand():
    # π: ½ ½ and ¼;  μ: ¼ ½ and ½.  Δ/log 2: 1 0 and -1.
    old = tensor([[0.5, 0.5], [0.25, 1.0]], dtype=F64).log()
    rollout = tensor([[0.25, 0.5], [0.5, 1.0]], dtype=F64).log()
    found = compute_offpolicy_metrics(old, rollout, tensor([[1, 1], [1, 0]]))
    assert found == approx(
        {
            "training_ppl": 3.0,  # 2 and 4
            "training_log_ppl": 1.5 * LOG2,
            "rollout_ppl": (2**1.5 + 2) / 2,  # -mean log μ is 1.5·log 2, and log 2
            "rollout_log_ppl": 1.25 * LOG2,
            "kl": 0.0,
            "k3_kl": ((2 - LOG2 - 1) + 0 + (0.5 + LOG2 - 1)) / 3,
            "log_ppl_diff": 0.25 * LOG2,  # of the responses -½ and 1
            "log_ppl_abs_diff": 0.75 * LOG2,
            "log_ppl_diff_max": LOG2,
            "log_ppl_diff_min": -0.5 * LOG2,
            "ppl_ratio": (2**-0.5 + 2) / 2,
            "chi2_token": (4 + 1 + 0.25) / 3 - 1,
            "chi2_seq": (4 + 0.25) / 2 - 1,
        }
    )
    alone = compute_offpolicy_metrics(old, None, tensor([[1, 1], [1, 0]]))
    assert alone == approx({"training_ppl": 3.0, "training_log_ppl": 1.5 * LOG2})


# ---- the whole correction


class Result:
    def __init__(self, weights: DataProto | None, mask: Tensor, metrics: dict[str, float]) -> None:
        self.weights: Any = None if weights is None else weights.batch["rollout_is_weights"]
        self.mask, self.metrics = mask, metrics


def correct(delta: list[Tensor], mask: Tensor = MASK, **changes: Any) -> Result:
    return Result(*compute_rollout_correction_and_rejection_mask(delta[0], torch.zeros_like(delta[0]), mask, **changes))


ALL = {
    "rollout_is": "sequence",
    "rollout_is_threshold": 2.0,
    "rollout_rs": ",".join(REJECTION_CRITERIA),
    "rollout_rs_threshold": ",".join("0.5_2.0" if c.endswith("k1") else "0.1" for c in REJECTION_CRITERIA),
}


@pytest.mark.proof("reductions", param="level")
@pytest.mark.proof("reductions", *REJECTION_CRITERIA)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threshold", [1.0, 2.0, "0.5_5.0"])
@pytest.mark.parametrize("normalize", [False, True])
def test_where_both_agree_nothing_happens(level: str, threshold: float | str, normalize: bool):
    log_prob = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    mask = tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    changes = ALL | {"rollout_is": level, "rollout_is_threshold": threshold}
    result = Result(
        *compute_rollout_correction_and_rejection_mask(
            log_prob, log_prob.clone(), mask, rollout_is_batch_normalize=normalize, **changes
        )
    )
    assert torch.equal(result.weights, mask.float())
    assert torch.equal(result.mask, mask)
    for name, value in result.metrics.items():
        key = name.removeprefix("rollout_corr/")
        if key.endswith("ppl") and "diff" not in key:
            continue  # of one distribution alone
        ones = ("mean", "min", "max", "ppl_ratio", "sample_size", "norm_factor")
        is_ratio = key.startswith("rollout_is") or "k1" in key or key == "ppl_ratio"
        assert value == approx(1.0 if is_ratio and key.endswith(ones) else 0.0), name


@pytest.mark.proof("reductions", "token")
def test_no_cap_is_the_exact_ratio():
    old, rollout = -torch.rand(2, 4, dtype=F64) * 3, -torch.rand(2, 4, dtype=F64) * 3
    result = Result(
        *compute_rollout_correction_and_rejection_mask(
            old, rollout, MASK, rollout_is="token", rollout_is_threshold=math.inf
        )
    )
    assert_close(result.weights, ((old - rollout).exp() * MASK).float())


@pytest.mark.proof("reductions", "token")
def test_inside_of_its_band_icepop_is_the_identity():
    near = DELTA * 0.1
    banded, capped = (
        correct([near], rollout_is="token", rollout_is_threshold=t).weights for t in ("0.5_5.0", math.inf)
    )
    assert torch.equal(banded, capped)


@pytest.mark.proof("reductions", "token", "sequence", *REJECTION_CRITERIA)
@settings(max_examples=30, deadline=None)
@given(deltas=st.lists(st.floats(-3, 3), min_size=1, max_size=6))
def test_on_responses_of_one_token_all_reductions_are_the_token(deltas: list[float]):
    delta = tensor([[d, 99.0] for d in deltas], dtype=F64)
    mask = tensor([[1, 0]] * len(deltas))
    for kind in ("k1", "k2", "k3"):
        whole = [c for c in REJECTION_CRITERIA if c.endswith(kind)]
        for name in whole[1:]:
            assert_close(rejection_statistic(delta, mask, name)[:, 0], rejection_statistic(delta, mask, whole[0])[:, 0])
    assert_close(importance_ratio(delta, mask, "sequence"), importance_ratio(delta, mask, "token"))


def test_k3_is_at_least_zero_and_near_k2_for_small_gaps():
    delta = torch.linspace(-3, 3, 61, dtype=F64).unsqueeze(0)
    k2, k3 = (rejection_statistic(delta, torch.ones_like(delta), f"token_{k}") for k in ("k2", "k3"))
    assert (k3 >= 0).all()
    small = delta.abs() < 0.11
    assert ((k2 - k3).abs() <= delta.abs() ** 3 / 5 + 1e-15)[small].all()  # Δ³/6 + ...


def test_ratios_cannot_overflow():
    delta = tensor([[500.0, -500.0, 500.0, 500.0]], dtype=F64)
    mask = torch.ones(1, 4, dtype=torch.long)
    for level in ("token", "sequence"):
        assert importance_ratio(delta, mask, level).max().item() == approx(math.exp(20))  # type: ignore[arg-type]
    result = correct([delta], mask, **ALL)
    assert torch.isfinite(result.weights).all()
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0


def test_long_responses_keep_their_digits():
    # 4096 tokens of Δ = 1e-4, in float32 columns near -1: the ratio of the response is e^0.4096.
    rollout = torch.full((1, 4096), -1.0, dtype=torch.float32)
    old = torch.full((1, 4096), -0.9999, dtype=torch.float32)
    step = old[0, 0].double().item() - -1.0
    mask = torch.ones(1, 4096, dtype=torch.long)
    ratio = importance_ratio(log_ratio_of(old, rollout, mask), mask, "sequence")
    assert ratio[0, 0].item() == pytest.approx(math.exp(4096 * step), rel=1e-12)


def test_the_difference_of_float32_columns_is_exact():
    old, rollout = torch.tensor([[-1.1, -7.3e-5]]), torch.tensor([[-0.3, -2.9]])
    assert ((old - rollout).double() != old.double() - rollout.double()).any()  # it would not be, in float32
    assert torch.equal(log_ratio_of(old, rollout, torch.ones(1, 2)), old.double() - rollout.double())


@pytest.mark.proof("masks", param="level")
@pytest.mark.proof("masks", *REJECTION_CRITERIA)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_places_are_never_read(garbage: float, level: Level):
    old, rollout = -torch.rand(3, 6, dtype=F64), -torch.rand(3, 6, dtype=F64)
    mask = tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    changes = ALL | {"rollout_is": level, "rollout_is_batch_normalize": True}
    clean = Result(*compute_rollout_correction_and_rejection_mask(old, rollout, mask, **changes))
    for which in ({"old"}, {"rollout"}, {"old", "rollout"}):
        dirty = [
            column.masked_fill(mask == 0, garbage) if name in which else column
            for name, column in (("old", old), ("rollout", rollout))
        ]
        found = Result(*compute_rollout_correction_and_rejection_mask(*dirty, mask, **changes))
        assert torch.equal(found.weights, clean.weights)
        assert torch.equal(found.mask, clean.mask)
        assert found.metrics == clean.metrics


@pytest.mark.proof("edges", param="level")
@pytest.mark.proof("edges", *REJECTION_CRITERIA)
@pytest.mark.parametrize("level", LEVELS)
def test_empty_responses_neither_count_nor_are_rejected(level: Level):
    changes = ALL | {"rollout_is": level, "rollout_is_batch_normalize": True}
    whole = correct([DELTA], MASK, **changes)
    more = correct(
        [torch.cat([DELTA, torch.full((2, 4), 7.0, dtype=F64)])], torch.cat([MASK, torch.zeros_like(MASK)]), **changes
    )
    assert more.metrics == approx(whole.metrics)
    assert torch.equal(more.weights[:2], whole.weights)
    assert more.weights[2:].sum() == 0


@pytest.mark.proof("edges", param="level")
@pytest.mark.proof("edges", *REJECTION_CRITERIA)
@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_without_a_valid_token(level: Level):
    changes = ALL | {"rollout_is": level, "rollout_is_batch_normalize": True}
    result = correct([DELTA], torch.zeros_like(MASK), **changes)
    assert result.weights.sum() == 0
    assert result.mask.sum() == 0
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0


def test_the_order_of_rows_changes_nothing():
    old, rollout = -torch.rand(6, 5, dtype=F64), -torch.rand(6, 5, dtype=F64)
    mask = (torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) < 0.7).long()
    changes = ALL | {"rollout_is_batch_normalize": True}
    whole = Result(*compute_rollout_correction_and_rejection_mask(old, rollout, mask, **changes))
    order = [3, 0, 5, 1, 4, 2]
    moved = Result(*compute_rollout_correction_and_rejection_mask(old[order], rollout[order], mask[order], **changes))
    assert_close(moved.weights, whole.weights[order])
    assert torch.equal(moved.mask, whole.mask[order])
    assert moved.metrics == approx(whole.metrics)


def test_the_mask_that_comes_back_is_a_new_one():
    mask = MASK.clone()
    compute_rollout_correction_and_rejection_mask(DELTA, DELTA, mask)[1].zero_()
    assert torch.equal(mask, MASK)


def test_weights_have_no_gradient():
    old = torch.zeros(2, 4, requires_grad=True)
    result = Result(*compute_rollout_correction_and_rejection_mask(old, torch.ones(2, 4), MASK, rollout_is="token"))
    assert not result.weights.requires_grad
    assert result.weights.dtype == torch.float32


# ---- on a batch


def batch() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "old_log_probs": DELTA.float(),
            "rollout_log_probs": torch.zeros(2, 4),
            "response_mask": MASK,
            "responses": torch.arange(8).view(2, 4),
        },
        non_tensors={"uid": np.array(["a", "b"], dtype=object)},
        meta_info={"global_steps": 3},
    )


def test_the_decoupled_correction_of_a_batch():
    before = batch()
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=3.0, rollout_rs="token_k1", rollout_rs_threshold="0.3_3.0"
    )
    columns, _ = corrected_columns(before, config)
    assert columns.batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert before.batch["response_mask"].tolist() == MASK.tolist()
    assert "rollout_is_weights" not in before.batch.keys()
    after, metrics = compute_rollout_correction_and_add_to_batch(before, config)
    assert after is before
    assert after.batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert_close(after.batch["rollout_is_weights"], tensor([[2.0, 0.5, 3.0, 0.0], [1.0, 0.25, 0.0, 0.0]]))
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(4.0)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.4)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(LOG2 - LOG2 + 2 * LOG2 + 0 - 2 * LOG2) / 5, abs=1e-6)
    assert after.non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert after.meta_info == {"global_steps": 3}


def test_without_weights_there_is_no_column_of_them():
    after, metrics = compute_rollout_correction_and_add_to_batch(batch(), RolloutCorrectionConfig.decoupled_geo_rs())
    assert "rollout_is_weights" not in after.batch.keys()
    assert after.batch["response_mask"].sum() == 0  # geometric means 1.59 and 0.5
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0


def test_off_it_only_measures():
    after, metrics = compute_rollout_correction_and_add_to_batch(batch(), RolloutCorrectionConfig.disabled())
    assert torch.equal(after.batch["response_mask"], MASK)
    expected = compute_offpolicy_metrics(DELTA.float(), torch.zeros(2, 4), MASK)
    assert metrics == {f"rollout_corr/{name}": value for name, value in expected.items()}


def test_bypass_takes_the_rollouts_log_probs():
    after = batch()
    apply_bypass_mode(after)
    assert after.batch["old_log_probs"].tolist() == [[0.0] * 4] * 2
    settings = OmegaConf.create({"loss_mode": "vanilla"})
    OmegaConf.set_struct(settings, True)
    correction = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token")
    helper.apply_rollout_correction(batch=after, rollout_corr_config=correction, policy_loss_config=settings)
    assert settings.loss_mode == "bypass_mode"
    assert settings.rollout_correction == DEFAULTS | {"bypass_mode": True, "rollout_is": "token"}
    for changed in (
        apply_bypass_mode,
        lambda b: compute_rollout_correction_and_add_to_batch(b, RolloutCorrectionConfig()),
    ):
        with pytest.raises(SchemaError, match=r"rollout_log_probs.*generate_sequences"):
            changed(batch().select(["old_log_probs", "response_mask"]))


def test_names_that_scripts_import():
    assert helper.SAFETY_BOUND == 20.0
    assert helper.SUPPORTED_ROLLOUT_RS_OPTIONS == REJECTION_CRITERIA


def test_pure_functions_by_hand():
    ratio = tensor([0.1, 0.5, 1.0, 5.0, 9.0], dtype=F64)
    assert importance_weights(ratio, Band(None, 5.0)).tolist() == [0.1, 0.5, 1.0, 5.0, 5.0]
    assert importance_weights(ratio, Band(0.5, 5.0)).tolist() == [0.0, 0.5, 1.0, 5.0, 0.0]
    weights = tensor([[3.0, 3.0, 9.0], [1.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=F64)
    mask = tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert normalisation_factor(weights, mask, "token").item() == approx(7 / 3)
    assert normalisation_factor(weights, mask, "sequence").item() == approx(2.0)
    assert Band(0.5, 2.0).contains(tensor([0.4, 0.5, 2.0, 2.1, math.nan])).tolist() == [False, True, True, False, False]
    criteria = parse_criteria("token_k1", 2.0)
    assert accepted(DELTA, MASK, criteria).tolist() == [[True, True, False, True], [True, False, True, True]]


# ---- presets

BAND, GEO = "0.5_2.0", "0.999_1.001"
SEQ_TIS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": GEO}
K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
GRADIENT = {"bypass_mode": True, "loss_type": "reinforce"}
PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": TOKEN_TIS,
    "decoupled_seq_is": SEQ_TIS,
    "decoupled_seq_mask": {"rollout_is": "sequence", "rollout_is_threshold": "0.0_3.0"},
    "decoupled_token_icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "decoupled_seq_is_rs": SEQ_TIS | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": BAND},
    "decoupled_geo_rs": GEO_RS,
    "decoupled_geo_rs_seq_tis": GEO_RS | SEQ_TIS,
    "decoupled_geo_rs_token_tis": GEO_RS | TOKEN_TIS,
    "decoupled_k3_rs": K3_RS,
    "decoupled_k3_rs_seq_tis": K3_RS | SEQ_TIS,
    "decoupled_k3_rs_token_tis": K3_RS | TOKEN_TIS,
    "a3po": TOKEN_TIS | {"prox_logp_method": "loglinear"},
    "bypass_ppo_clip": CLIP,
    "bypass_ppo_clip_geo_rs": CLIP | GEO_RS,
    "bypass_ppo_clip_k3_rs": CLIP | K3_RS,
    "bypass_pg_is": GRADIENT | SEQ_TIS,
    "bypass_pg_token_icepop": GRADIENT | {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "bypass_pg_geo_rs": GRADIENT | GEO_RS,
    "bypass_pg_geo_rs_seq_tis": GRADIENT | GEO_RS | SEQ_TIS,
    "bypass_pg_geo_rs_token_tis": GRADIENT | GEO_RS | TOKEN_TIS,
}
DEFAULTS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
    "rollout_is_batch_normalize": False,
    "prox_logp_method": "recompute",
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_their_documented_settings(name: str):
    preset = getattr(RolloutCorrectionConfig, name)()
    assert preset.to_dict() == DEFAULTS | PRESETS[name]
    parse_is_threshold(preset.rollout_is_threshold)
    if preset.rollout_rs is not None:
        parse_criteria(preset.rollout_rs, preset.rollout_rs_threshold)
    corrects = preset.rollout_is is not None or preset.rollout_rs is not None
    assert preset.is_decoupled == (corrects and name.startswith("decoupled"))


def test_every_preset_is_known_here():
    made = {k for k, v in vars(RolloutCorrectionConfig).items() if isinstance(v, classmethod) and not k.startswith("_")}
    assert made == PRESETS.keys()


def test_a_mask_of_responses_drops_those_whose_ratio_is_too_large():
    # e^1.2 = 3.32 > 3 is dropped with all its tokens; e^0.9 keeps its weight, and so does a tiny ratio
    deltas = tensor([[0.8, 0.4], [0.5, 0.4], [-9.0, -9.0]], dtype=F64)
    weights, _ = compute_rollout_correction_weights(deltas, torch.ones(3, 2), "sequence", "0.0_3.0")
    expected = tensor([[0.0] * 2, [math.exp(0.9)] * 2, [math.exp(-18.0)] * 2])
    assert_close(weights.float(), expected, rtol=1e-6, atol=0)


def test_presets_take_their_thresholds():
    made = RolloutCorrectionConfig.decoupled_seq_is_rs(is_threshold=3.0, rs_threshold="0.7_1.3")
    assert (made.rollout_is_threshold, made.rollout_rs_threshold) == (3.0, "0.7_1.3")
    assert RolloutCorrectionConfig.decoupled_token_icepop("0.4_4.0").rollout_is_threshold == "0.4_4.0"
    assert RolloutCorrectionConfig.bypass_pg_is(5.0).rollout_is_threshold == 5.0
    assert dataclasses.replace(made, rollout_rs_threshold=1.5).rollout_rs_threshold == 1.5
