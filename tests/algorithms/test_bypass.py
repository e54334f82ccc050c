"""The loss of the bypass mode: by hand, slow oracle, reductions, gradients, masks, the partition law."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.testing import assert_close

from verl.algorithms import (
    LOSS_AGG_MODES,
    compute_policy_loss_bypass_mode,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
)
from verl.errors import ConfigError
from verl.trainer.config import RolloutCorrectionConfig
from verl.workers.config import ActorConfig, PolicyLossConfig

F64 = torch.float64
MODES = [mode for mode in LOSS_AGG_MODES if mode != "prompt-mean"]  # that needs groups: see test_policy_loss_laws.py


def actor(correction: RolloutCorrectionConfig | None, **changes: Any) -> ActorConfig:
    loss = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction)
    return ActorConfig(**{"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "policy_loss": loss, **changes})


def reinforce(**changes: Any) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", **changes)


def ppo_clip(**changes: Any) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(bypass_mode=True, loss_type="ppo_clip", **changes)


# μ gives ½ to every token; π_θ gives 2 ½ 1 times as much to the first response, ¼ to the second. The last place of
# the second response is masked.
MU = torch.full((2, 3), 0.5, dtype=F64).log()
PI = tensor([[1.0, 0.25, 0.5], [0.125, 0.5, 0.5]], dtype=F64).log()
A = tensor([[1.0, -1.0, 2.0], [3.0, 1.0, 9.0]], dtype=F64)
MASK = tensor([[1, 1, 1], [1, 1, 0]])
LOG = [[math.log(p) for p in row] for row in ((1.0, 0.25, 0.5), (0.125, 0.5, 0.5))]


def loss_of(correction: RolloutCorrectionConfig, mode: str = "token-mean", **changes: Any) -> tuple[float, dict]:
    loss, metrics = compute_policy_loss_bypass_mode(MU, PI, A, MASK, mode, actor(correction, **changes))
    return loss.item(), metrics


@pytest.mark.proof("by hand", "bypass_mode")
def test_reinforce_without_weights_by_hand():
    terms = [-1 * LOG[0][0], 1 * LOG[0][1], -2 * LOG[0][2], -3 * LOG[1][0], -1 * LOG[1][1]]
    loss, metrics = loss_of(reinforce())
    assert loss == pytest.approx(sum(terms) / 5)
    log2 = math.log(2)
    # Δ/log 2: 1 -1 0 and -2 0; k3 of 2 ½ 1 ¼ 1.
    assert metrics == pytest.approx(
        {
            "actor/ppo_kl": 2 * log2 / 5,
            "rollout_corr/kl": 2 * log2 / 5,
            "rollout_corr/k3_kl": ((1 - log2) + (log2 - 0.5) + (2 * log2 - 0.75)) / 5,
            "rollout_corr/chi2_token": (4 + 0.25 + 1 + 1 / 16 + 1) / 5 - 1,
            "actor/pg_clipfrac": 0.0,
            "actor/pg_clipfrac_lower": 0.0,
        }
    )


@pytest.mark.proof("by hand", "bypass_mode")
def test_reinforce_with_token_weights_by_hand():
    # Ratios 2 ½ 1 and ¼ 1, capped at 1.5.
    terms = [-1.5 * LOG[0][0], 0.5 * LOG[0][1], -2 * LOG[0][2], -0.75 * LOG[1][0], -1 * LOG[1][1]]
    loss, metrics = loss_of(reinforce(rollout_is="token", rollout_is_threshold=1.5))
    assert loss == pytest.approx(sum(terms) / 5)
    ratios = {name.removeprefix("rollout_corr/rollout_is_"): value for name, value in metrics.items() if "_is_" in name}
    assert ratios == pytest.approx(
        {
            "mean": 4.75 / 5,
            "max": 2.0,
            "min": 0.25,
            "ratio_fraction_high": 0.2,
            "ratio_fraction_low": 0.4,  # ½ and ¼ are below 1/1.5
        }
    )


@pytest.mark.proof("by hand", "bypass_mode")
def test_reinforce_with_sequence_weights_by_hand():
    # Products 1 and ¼, in each mode of aggregation.
    first, second = -LOG[0][0] + LOG[0][1] - 2 * LOG[0][2], (-3 * LOG[1][0] - LOG[1][1]) / 4
    correction = reinforce(rollout_is="sequence")
    assert loss_of(correction)[0] == pytest.approx((first + second) / 5)
    assert loss_of(correction, "seq-mean-token-sum")[0] == pytest.approx((first + second) / 2)
    assert loss_of(correction, "seq-mean-token-mean")[0] == pytest.approx((first / 3 + second / 2) / 2)


@pytest.mark.proof("by hand", "bypass_mode")
def test_icepop_by_hand():
    terms = [-2 * LOG[0][0], 0.5 * LOG[0][1], -2 * LOG[0][2], 0.0, -1 * LOG[1][1]]  # ¼ is outside
    assert loss_of(reinforce(rollout_is="token", rollout_is_threshold="0.5_5.0"))[0] == pytest.approx(sum(terms) / 5)


@pytest.mark.proof("by hand", "bypass_mode")
def test_ppo_clip_by_hand():
    # r = 2 ½ 1 and ¼ 1; clipped to [.8, 1.3]: -1.3, +.8 (A < 0), -2, -.75, -1.
    loss, metrics = loss_of(ppo_clip())
    assert loss == pytest.approx((-1.3 + 0.8 - 2 - 0.75 - 1) / 5)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 5)


@pytest.mark.proof("by hand", "bypass_mode")
def test_rejection_by_hand():
    # The product of the second response is ¼: it is rejected, and stays in the denominators.
    rejecting = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
    loss, metrics = loss_of(ppo_clip(**rejecting))
    assert loss == pytest.approx((-1.3 + 0.8 - 2) / 5)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 5)
    assert loss_of(ppo_clip(**rejecting), "seq-mean-token-mean")[0] == pytest.approx((-1.3 + 0.8 - 2) / 3 / 2)
    # Single tokens: of the first response the ratios 2 and ½ leave, of the second ¼.
    alone = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.5"}
    assert loss_of(ppo_clip(**alone), "seq-mean-token-mean")[0] == pytest.approx((-2 / 3 - 1 / 2) / 2)
    assert loss_of(reinforce(**alone))[0] == pytest.approx((-2 * LOG[0][2] - LOG[1][1]) / 5)


@pytest.mark.proof("edges", "bypass_mode")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [ppo_clip, reinforce])
def test_everything_rejected_is_no_loss_and_no_gradient(mode: str, kind: Any):
    log_prob = PI.clone().requires_grad_()
    correction = kind(rollout_rs="token_k3", rollout_rs_threshold=1e-9)
    loss, metrics = compute_policy_loss_bypass_mode(MU - 3, log_prob, A, MASK, mode, actor(correction))
    loss.backward()
    assert loss.item() == 0.0
    assert (log_prob.grad == 0).all()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0


# ---- slow oracle


def batch(seed: int, rows: int = 5, width: int = 6, spread: float = 0.7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, width)
    old = -torch.rand(shape, generator=generator, dtype=F64) * 3
    return {
        "old_log_prob": old,
        "log_prob": old + spread * torch.randn(shape, generator=generator, dtype=F64),
        "advantages": torch.randn(shape, generator=generator, dtype=F64),
        "response_mask": (torch.rand(shape, generator=generator) < 0.7).long(),
    }


CORRECTIONS = {
    "clip": ppo_clip(),
    "clip, token rejection": ppo_clip(rollout_rs="token_k1", rollout_rs_threshold=2.0),
    "clip, two rejections": ppo_clip(rollout_rs="seq_mean_k3,token_k2", rollout_rs_threshold="0.4,0.8"),
    "gradient": reinforce(),
    "gradient, token weights": reinforce(rollout_is="token"),
    "gradient, sequence weights": reinforce(rollout_is="sequence", rollout_is_threshold=1.2),
    "gradient, icepop": reinforce(rollout_is="token", rollout_is_threshold="0.5_2.0"),
    "gradient, all": reinforce(
        rollout_is="sequence", rollout_rs="seq_mean_k1,seq_max_k2", rollout_rs_threshold="0.5_2.0,1.5"
    ),
}


def slow_loss(data: dict[str, Tensor], c: RolloutCorrectionConfig) -> float:
    """The token mean of the definition, for the corrections above."""
    total, count = 0.0, 0
    for old, new, adv, mask in zip(*(data[k].tolist() for k in data), strict=True):
        valid = [(n - o, n, a) for o, n, a, m in zip(old, new, adv, mask, strict=True) if m]
        deltas = [d for d, _, _ in valid]
        for d, n, a in valid:
            count += 1
            k1, k2 = {"token": d, "sequence": sum(deltas)}.get(c.rollout_is or ""), [x * x / 2 for x in deltas]
            weight = 1.0 if k1 is None else math.exp(k1)
            if isinstance(c.rollout_is_threshold, str):
                weight = weight if 0.5 <= weight <= 2.0 else 0.0
            elif k1 is not None:
                weight = min(weight, c.rollout_is_threshold)
            loss = -weight * a * n
            if c.loss_type == "ppo_clip":
                r = math.exp(d)
                loss = max(-a * r, -a * max(0.8, min(1.3, r)))
                loss = min(loss, -a * 3.0) if a < 0 else loss
            k3 = [math.exp(x) - 1 - x for x in deltas]
            inside = {
                "token_k1": 0.5 <= math.exp(d) <= 2.0,
                "token_k2": d * d / 2 <= 0.8,
                "seq_mean_k3": sum(k3) / len(k3) <= 0.4,
                "seq_mean_k1": 0.5 <= math.exp(sum(deltas) / len(deltas)) <= 2.0,
                "seq_max_k2": max(k2) <= 1.5,
            }
            total += loss * all(inside[name] for name in (c.rollout_rs or "").split(",") if name)
    return total / max(count, 1)


@pytest.mark.proof("oracle", "bypass_mode")
@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_against_the_slow_form(name: str, seed: int):
    data, correction = batch(seed), CORRECTIONS[name]
    loss, _ = compute_policy_loss_bypass_mode(**data, config=actor(correction))
    assert loss.item() == pytest.approx(slow_loss(data, correction), rel=1e-9, abs=1e-12)


# ---- reductions and gradients


@pytest.mark.proof("reductions", "bypass_mode", "vanilla")
@pytest.mark.parametrize("mode", MODES)
def test_clip_without_rejection_is_the_vanilla_loss(mode: str):
    data, config = batch(1), actor(ppo_clip(rollout_is="token"))  # weights have no part in it
    loss, metrics = compute_policy_loss_bypass_mode(**data, loss_agg_mode=mode, config=config)
    vanilla, expected = compute_policy_loss_vanilla(**data, loss_agg_mode=mode, config=config)
    assert_close(loss, vanilla)
    for name, value in expected.items():
        assert_close(metrics[name], value, check_dtype=False)


@pytest.mark.proof("reductions", "bypass_mode")
def test_on_policy_both_kinds_have_the_policy_gradient():
    data = batch(2, spread=0.0)
    for correction in (ppo_clip(), reinforce(), reinforce(rollout_is="token"), reinforce(rollout_is="sequence")):
        log_prob = data["log_prob"].clone().requires_grad_()
        loss, _ = compute_policy_loss_bypass_mode(
            **{**data, "log_prob": log_prob}, loss_agg_mode="token-sum", config=actor(correction)
        )
        loss.backward()
        assert_close(log_prob.grad, -data["advantages"] * data["response_mask"])


@pytest.mark.proof("reductions", "bypass_mode")
def test_reinforce_with_exact_weights_has_the_gradient_of_importance_sampling():
    """∇(-ρ·A) = -ρ·A·∇log π: with no cap in the way the weighted gradient is that of the unclipped surrogate."""
    data = batch(3)
    surrogate = actor(ppo_clip(), clip_ratio_low=1.0, clip_ratio_high=1e9, clip_ratio_c=1e9)
    weighted = actor(reinforce(rollout_is="token", rollout_is_threshold=math.inf))
    gradients = []
    for config in (surrogate, weighted):
        log_prob = data["log_prob"].clone().requires_grad_()
        compute_policy_loss_bypass_mode(**{**data, "log_prob": log_prob}, config=config)[0].backward()
        gradients.append(log_prob.grad)
    assert_close(*gradients)


@pytest.mark.proof("gradient", "bypass_mode")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["clip, token rejection", "gradient"])
def test_gradient_against_finite_differences(mode: str, name: str):
    """Where weights are constants; those of reinforce depend on log π, and get no gradient by design."""
    data = batch(4, rows=3, width=4, spread=0.3)

    def loss(log_prob: Tensor) -> Tensor:
        return compute_policy_loss_bypass_mode(**{**data, "log_prob": log_prob}, loss_agg_mode=mode, config=config)[0]

    config = actor(CORRECTIONS[name])
    assert torch.autograd.gradcheck(loss, data["log_prob"].clone().requires_grad_())


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name.startswith("gradient")])
def test_weights_and_rejection_are_constants_of_the_gradient(name: str):
    """The gradient is w·s times the one without a correction."""
    data, correction = batch(5), CORRECTIONS[name]
    log_prob = data["log_prob"].clone().requires_grad_()
    loss, _ = compute_policy_loss_bypass_mode(
        **{**data, "log_prob": log_prob}, loss_agg_mode="token-sum", config=actor(correction)
    )
    loss.backward()
    scale = loss_scale(data, correction)
    assert_close(log_prob.grad, -data["advantages"] * scale * data["response_mask"])


def loss_scale(data: dict[str, Tensor], correction: RolloutCorrectionConfig) -> Tensor:
    """w·s of every token, read off the loss of single tokens."""
    scale = torch.zeros_like(data["log_prob"])
    for row in range(len(scale)):
        for t in range(scale.shape[1]):
            only = torch.zeros_like(scale)
            only[row, t] = 1.0
            config = actor(correction)
            loss, _ = compute_policy_loss_bypass_mode(
                **{**data, "advantages": only}, loss_agg_mode="token-sum", config=config
            )
            scale[row, t] = -loss / data["log_prob"][row, t] if data["response_mask"][row, t] else 0.0
    return scale


def test_further_weights_multiply_each_token():
    data = batch(6)
    chosen = (torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) < 0.5).double()
    for correction in CORRECTIONS.values():
        loss, _ = compute_policy_loss_bypass_mode(
            **data, loss_agg_mode="token-sum", config=actor(correction), rollout_is_weights=chosen
        )
        alone = {**data, "advantages": data["advantages"] * chosen}
        expected, _ = compute_policy_loss_bypass_mode(**alone, loss_agg_mode="token-sum", config=actor(correction))
        assert_close(loss, expected)


# ---- masks, layout


@pytest.mark.proof("masks", "bypass_mode")
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", [("advantages",), ("log_prob",), ("old_log_prob", "log_prob", "advantages")])
def test_masked_places_are_never_read(name: str, garbage: float, columns: tuple[str, ...]):
    clean, config = batch(7), actor(CORRECTIONS[name])
    masked = clean["response_mask"] == 0
    dirty = {k: v.masked_fill(masked, garbage) if k in columns else v for k, v in clean.items()}
    log_prob = dirty["log_prob"].clone().requires_grad_()
    loss, metrics = compute_policy_loss_bypass_mode(**{**dirty, "log_prob": log_prob}, config=config)
    assert_close((loss, metrics), compute_policy_loss_bypass_mode(**clean, config=config))
    loss.backward()
    assert torch.isfinite(log_prob.grad).all()
    assert (log_prob.grad[masked] == 0).all()


@pytest.mark.proof("edges", "bypass_mode")
@pytest.mark.parametrize("name", CORRECTIONS)
def test_rows_without_a_valid_token_add_nothing(name: str):
    data, config = batch(8), actor(CORRECTIONS[name])
    data["response_mask"][2:] = 0
    head = {key: column[:2] for key, column in data.items()}
    loss, metrics = compute_policy_loss_bypass_mode(**data, config=config)
    assert_close((loss, metrics), compute_policy_loss_bypass_mode(**head, config=config))
    data["response_mask"][:] = 0
    loss, _ = compute_policy_loss_bypass_mode(**data, config=config)
    assert loss == 0.0


@pytest.mark.proof("partition", "bypass_mode")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31), labels=st.lists(st.integers(0, 2), min_size=5, max_size=5), dp_size=st.integers(1, 3)
)
def test_partition_law(mode: str, name: str, seed: int, labels: list[int], dp_size: int):
    """Loss, gradient, and metrics (weighted by tokens, or extremes) of any split are those of the whole."""
    data, whole_config = batch(seed), actor(CORRECTIONS[name])
    tokens = int(data["response_mask"].sum())
    whole = data["log_prob"].clone().requires_grad_()
    value, metrics = compute_policy_loss_bypass_mode(
        **{**data, "log_prob": whole}, loss_agg_mode=mode, config=whole_config
    )
    value.backward()
    totals = {"dp_size": dp_size, "batch_num_tokens": max(tokens, 1), "global_batch_size": 5}
    config = dataclasses.replace(whole_config, global_batch_info=totals)
    split, total = data["log_prob"].clone().requires_grad_(), torch.zeros((), dtype=F64)
    parts: dict[str, list[tuple[float, float]]] = {key: [] for key in metrics}
    for label in set(labels):
        rows = [i for i in range(5) if labels[i] == label]
        part = {key: column[rows] for key, column in {**data, "log_prob": split}.items()}
        loss, found = compute_policy_loss_bypass_mode(**part, loss_agg_mode=mode, config=config)
        total = total + loss / dp_size
        size = int(part["response_mask"].sum())
        for key in metrics if size else ():
            parts[key].append((size / tokens, found[key]))
    total.backward()
    assert_close(total, value)
    assert_close(split.grad, whole.grad)
    for key, shares in parts.items() if tokens else ():
        values = [value for _, value in shares]
        combined = sum(w * v for w, v in shares)
        combined = max(values) if key.endswith("_max") else min(values) if key.endswith("_min") else combined
        assert combined == pytest.approx(metrics[key], rel=1e-5, abs=1e-6), key


def test_weights_are_not_silently_left_as_they_are():
    normalised = RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True
    )
    one = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match="rollout_is_batch_normalize=true cannot be used"):
        compute_policy_loss_bypass_mode(one, one, one, torch.ones(1, 1), config=actor(normalised))


def test_a_ratio_cannot_overflow():
    far = tensor([[-500.0, 0.0]]), tensor([[0.0, -500.0]]), tensor([[-1.0, 1.0]]), torch.ones(1, 2)
    for correction in CORRECTIONS.values():
        loss, metrics = compute_policy_loss_bypass_mode(*far, config=actor(correction))
        assert torch.isfinite(loss)
        assert all(math.isfinite(value) for value in metrics.values())


# ---- settings


def test_it_is_chosen_by_name():
    function = get_policy_loss_fn("bypass_mode")
    config = actor(ppo_clip())
    assert_close(
        function(**batch(0), loss_agg_mode="token-mean", config=config, rollout_is_weights=None),
        compute_policy_loss_bypass_mode(**batch(0), config=config),
    )


def test_without_settings_it_says_where_they_come_from():
    with pytest.raises(ConfigError, match=r"pass rollout_correction=.*rollout_correction.bypass_mode=true"):
        compute_policy_loss_bypass_mode(**batch(0), config=actor(None))
