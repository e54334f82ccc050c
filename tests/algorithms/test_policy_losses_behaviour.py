"""Losses of 2025 and 2026 on numbers worked by hand, against their definitions, and what they reduce to.

The policies: π being updated, π_old before the update, μ that drew the samples.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.testing import assert_close

from tests.support.losses import actor, batch, evaluate
from verl.algorithms import bias_corrected_kl, kl_penalty
from verl.algorithms.policy_losses.behaviour import second_moment_mask
from verl.algorithms.prepare import observation_weights
from verl.algorithms.rollout_correction import off_policy_sequence_mask
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.workers.config import ActorConfig
from verl.workers.engine import BatchTotals
from verl.workers.engine.model.inputs import prepare_inputs
from verl.workers.losses import PolicyLoss

LN2 = math.log(2)
NAMES = ("up", "cfpo", "vespo", "topr", "m2po")


def probabilities(sampled: list, old: list, new: list, advantages: list, mask: list | None = None) -> dict[str, Tensor]:
    """A mini-batch from probabilities of μ, π_old and π."""
    columns = {"rollout_log_probs": sampled, "old_log_probs": old, "log_probs": new}
    data = {name: tensor(values, dtype=torch.float64).log() for name, values in columns.items()}
    data["advantages"] = tensor(advantages, dtype=torch.float64)
    return data | {"response_mask": torch.ones_like(data["advantages"]).long() if mask is None else tensor(mask)}


def stale(seed: int, spread: float = 0.5, per_row: bool = False) -> dict[str, Tensor]:
    """A mini-batch whose samples are of a policy that is neither the current nor the old one."""
    data = batch(seed, spread=spread, per_row=per_row)
    noise = torch.randn(data["log_probs"].shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return data | {"rollout_log_probs": (data["old_log_probs"] + spread * noise).clamp(max=-1e-4)}


# ---- by hand ------------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "up")
def test_up_by_hand():
    # A > 0: value -A, gradient -A, though r = 4. A < 0: r = 1/2, clipped at 0.8: 2·0.8, no gradient. A = 0: nothing.
    data = probabilities([[0.2, 0.8, 0.5]], [[0.2, 0.8, 0.5]], [[0.8, 0.4, 0.9]], [[3.0, -2.0, 0.0]])
    loss, metrics, gradient = evaluate("up", data)
    assert loss.item() == pytest.approx(-3 + 1.6)
    assert gradient[0].tolist() == pytest.approx([-3.0, 0.0, 0.0])
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(1 / 3)


@pytest.mark.proof("by hand", "cfpo")
@pytest.mark.parametrize(
    ("old", "new", "advantage", "loss", "slope"),
    [
        # ε_high = 0.3: r = 2: -(3·2 - 3/0.6·1) = -1; dl/dlogπ = -r(A - |A|/ε·(r - 1)) = -2(3 - 10)
        (0.4, 0.8, 3.0, -1.0, 14.0),
        # r = 1.3, the edge of PPO's clip: at rest. -(3·1.3 - 5·0.09)
        (0.5, 0.65, 3.0, -3.45, 0.0),
        # ε_low = 0.2, A < 0: r = 1/2: -(-2·½ - 2/0.4·¼) = 2.25; -½(-2 + 10·½)
        (0.8, 0.4, -2.0, 2.25, -1.5),
    ],
)
def test_cfpo_by_hand(old: float, new: float, advantage: float, loss: float, slope: float):
    found, _, gradient = evaluate("cfpo", probabilities([[old]], [[old]], [[new]], [[advantage]]))
    assert found.item() == pytest.approx(loss)
    assert gradient.item() == pytest.approx(slope, abs=1e-12)


def test_cfpo_without_a_bound_is_refused():
    with pytest.raises(ConfigError, match=r"cfpo policy loss divides by its bounds, and clip_ratio_low=0\.0"):
        evaluate("cfpo", batch(0), config=actor("cfpo", clip_ratio_low=0.0))


# row 1: W = 2·(1/2)·... = (0.8/0.4)·(0.1/0.2) = 1 on two tokens; row 2: W = 0.9/0.45 = 2, one token masked
TWO = probabilities(
    [[0.4, 0.2], [0.45, 0.5]],
    [[0.5, 0.3], [0.6, 0.5]],
    [[0.8, 0.1], [0.9, 0.9]],
    [[3.0, 3.0], [-2.0, -2.0]],
    [[1, 1], [1, 0]],
)


@pytest.mark.proof("by hand", "vespo")
def test_vespo_by_hand():
    # φ(1) = 1; A < 0, k = 3, λ = 2: φ(2) = 8·e^{-2} = 1.082682
    loss, metrics, gradient = evaluate("vespo", TWO)
    assert gradient.flatten().tolist() == pytest.approx([-3.0, -3.0, 2 * 8 * math.exp(-2), 0.0])
    assert loss.item() == pytest.approx(-3 * (math.log(0.8) + math.log(0.1)) + 16 * math.exp(-2) * math.log(0.9))
    assert metrics["actor/vespo_weight"].item() == pytest.approx((2 + 8 * math.exp(-2)) / 3)
    # A > 0, k = 2, λ = 3: φ(2) = 4·e^{-3}
    flipped = TWO | {"advantages": -TWO["advantages"]}
    assert evaluate("vespo", flipped)[2][1, 0].item() == pytest.approx(-2 * 4 * math.exp(-3))


@pytest.mark.proof("by hand", "topr")
def test_topr_by_hand():
    # A < 0 and W = 2: cut to 1. With the policies of row 2 exchanged W = 1/2: half the gradient.
    loss, metrics, gradient = evaluate("topr", TWO)
    assert gradient.flatten().tolist() == pytest.approx([-3.0, -3.0, 2.0, 0.0])
    assert loss.item() == pytest.approx(-3 * (math.log(0.8) + math.log(0.1)) + 2 * math.log(0.9))
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(1 / 3)
    swapped = TWO | {"log_probs": TWO["rollout_log_probs"], "rollout_log_probs": TWO["log_probs"]}
    assert evaluate("topr", swapped)[2].flatten().tolist() == pytest.approx([-3.0, -3.0, 1.0, 0.0])


# log π_old/μ: 0.1, 0.2, 0.3, 0.4, -0.5 with A > 0 but the last with A < 0, and -0.9 with A > 0, on which no clip acts
DELTA = tensor([[0.1, 0.2, 0.3, 0.4, -0.5, -0.9, 7.0]], dtype=torch.float64)
SIGNS = tensor([[1.0, 1.0, 1.0, 1.0, -1.0, 1.0, 1.0]], dtype=torch.float64)
VALID = tensor([[1, 1, 1, 1, 1, 1, 0]])


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        (1.0, [1, 1, 1, 1, 1, 1, 0]),
        (0.11, [1, 1, 1, 1, 1, 1, 0]),  # (.01 + .04 + .09 + .16 + .25) / 5 = 0.11, within rounding below
        (0.109, [1, 1, 1, 1, 0, 1, 0]),  # without .25 the mean is 0.075
        (0.04, [1, 1, 0, 0, 0, 1, 0]),  # (.01 + .04 + .09)/3 = 0.0467 is too much, (.01 + .04)/2 = 0.025 not
        (0.001, [0, 0, 0, 0, 0, 1, 0]),
    ],
)
def test_the_second_moment_mask_by_hand(threshold: float, kept: list[int]):
    assert second_moment_mask(DELTA, SIGNS, VALID, threshold + 1e-12).int().tolist() == [kept]


def test_of_equal_ratios_the_later_ones_are_taken_out():
    ones = torch.ones(2, 2)
    # of four squares 0.09, two groups 0.0225: the mean of three is 0.045, of two 0.0225
    kept = second_moment_mask(tensor([[0.3, 0.15], [0.15, 0.3]]), ones, ones.long(), 0.05)
    assert kept.tolist() == [[True, True], [True, False]]


@pytest.mark.proof("by hand", "m2po")
def test_m2po_by_hand():
    # π_old/μ = 2 with A > 0: ln²2 = 0.48 alone is too much. Row 2 has A < 0 and a ratio above 1: no clip, r = 2.
    data = probabilities(
        [[0.4, 0.5], [0.4, 0.1]], [[0.8, 0.5], [0.8, 0.1]], [[0.8, 0.6], [0.8, 0.1]], [[3.0] * 2, [-2.0] * 2]
    )
    loss, metrics, gradient = evaluate("m2po", data)
    assert gradient.flatten().tolist() == pytest.approx([0.0, -3 * 1.2, 4.0, 2.0])
    assert loss.item() == pytest.approx(-3.6 + 4 + 2)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(1 / 4)


# ---- against the definitions --------------------------------------------------------------------


def slow(name: str, data: dict[str, Tensor], config: ActorConfig) -> Tensor:
    """The gradient by the log-probs, from the definitions, in loops."""
    columns = {key: column.tolist() for key, column in data.items()}
    new, old, drawn = (columns[key] for key in ("log_probs", "old_log_probs", "rollout_log_probs"))
    A, mask = columns["advantages"], columns["response_mask"]
    cells = [(i, t) for i in range(len(mask)) for t in range(len(mask[i])) if mask[i][t]]
    low, high, own = config.clip_ratio_low, config.clip_ratio_high, config.policy_loss
    region = {c: old[c[0]][c[1]] - drawn[c[0]][c[1]] for c in cells}
    region = {c: d for c, d in region.items() if d * A[c[0]][c[1]] > 0}
    gone = set()
    while region and sum(d * d for d in region.values()) / len(region) > own.m2_threshold:
        worst = max(region, key=lambda c: (abs(region[c]), c))
        gone.add(worst)
        del region[worst]
    gradient = torch.zeros(data["advantages"].shape, dtype=torch.float64)
    for i, t in cells:
        a, r = A[i][t], math.exp(new[i][t] - old[i][t])
        W = math.prod(math.exp(new[i][s] - drawn[i][s]) for s in range(len(mask[i])) if mask[i][s])
        k, rate = (own.vespo_k_pos, own.vespo_lambda_pos) if a >= 0 else (own.vespo_k_neg, own.vespo_lambda_neg)
        eps = high if a > 0 else low
        gradient[i, t] = {
            "up": -a if a > 0 else (-a * r if r >= 1 - low and r <= config.clip_ratio_c else 0.0),
            "cfpo": -r * (a - abs(a) / eps * (r - 1)),
            "vespo": -(W**k) * math.exp(rate * (1 - W)) * a,
            "topr": -a * (1.0 if a >= 0 else min(W, 1.0)),
            "m2po": 0.0 if (i, t) in gone else -a * math.exp(new[i][t] - drawn[i][t]),
        }[name]
    return gradient


@pytest.mark.proof("oracle", param="name")
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.05, 0.4, 1.5]))
@pytest.mark.parametrize("name", NAMES)
def test_against_the_definition(name: str, seed: int, spread: float):
    data, config = stale(seed, spread), actor(name)
    assert_close(evaluate(name, data, config=config)[2], slow(name, data, config), rtol=1e-9, atol=1e-12)


@pytest.mark.proof("gradient", "up")
def test_up_against_finite_differences():
    """Of the value with the anchor sg[π] held, which the definition gives as a number of the first pass."""
    data = batch(1, spread=0.4)
    _, _, gradient = evaluate("up", data)
    step = 1e-6
    for i, t in data["response_mask"].nonzero().tolist():
        A, new, old = (data[key][i, t].item() for key in ("advantages", "log_probs", "old_log_probs"))

        def value(moved: float, A: float = A, new: float = new, old: float = old) -> float:
            if A > 0:
                return -A * math.exp(moved - new)
            r = math.exp(moved - old)
            return min(max(-A * r, -A * min(max(r, 0.8), 1.3)), -A * 3.0)

        expected = (value(new + step) - value(new - step)) / (2 * step)
        assert gradient[i, t].item() == pytest.approx(expected, rel=1e-5, abs=1e-8)


# ---- reductions ---------------------------------------------------------------------------------


@pytest.mark.proof("reductions", "up")
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_up_is_gpg_on_good_responses_and_ppo_on_bad_ones(sign: float):
    data = batch(2, spread=1.0)
    data["advantages"] = sign * data["advantages"].abs()
    other = "gpg" if sign > 0 else "vanilla"
    assert_close(evaluate("up", data)[2], evaluate(other, data)[2])


@pytest.mark.proof("reductions", "cfpo")
def test_cfpo_with_wide_bounds_is_importance_sampling():
    data = batch(3)
    ratio = (data["log_probs"] - data["old_log_probs"]).exp()
    wide = actor("cfpo", clip_ratio_low=1e12, clip_ratio_high=1e12)
    assert_close(evaluate("cfpo", data, config=wide)[2], -ratio * data["advantages"] * data["response_mask"])


@pytest.mark.proof("reductions", "vespo", "topr")
def test_without_their_bounds_they_are_importance_sampling_of_responses():
    data = stale(4)
    gap = (data["log_probs"] - data["rollout_log_probs"]) * data["response_mask"]
    W = gap.sum(-1, keepdim=True).exp()
    plain = {f"vespo_{key}_{side}": value for key, value in (("k", 1.0), ("lambda", 0.0)) for side in ("pos", "neg")}
    expected = -W * data["advantages"] * data["response_mask"]
    assert_close(evaluate("vespo", data, config=actor("vespo", plain))[2], expected)
    bad = data | {"advantages": -data["advantages"].abs()}
    near = (W <= 1).expand_as(gap) & data["response_mask"].bool()
    expected = W * bad["advantages"].abs()
    assert near.any()
    assert_close(evaluate("topr", bad)[2][near], expected[near])


@pytest.mark.proof("reductions", "vespo")
def test_vespo_with_k_and_lambda_0_is_gpg():
    plain = {f"vespo_{key}_{side}": 0.0 for key in ("k", "lambda") for side in ("pos", "neg")}
    assert_close(evaluate("vespo", stale(5), config=actor("vespo", plain))[2], evaluate("gpg", stale(5))[2])


@pytest.mark.proof("reductions", "topr")
def test_topr_on_good_responses_is_gpg():
    data = stale(6)
    data["advantages"] = data["advantages"].abs()
    assert_close(evaluate("topr", data)[2], evaluate("gpg", data)[2])


@pytest.mark.proof("reductions", "m2po")
def test_m2po_without_a_bound_is_ppo_without_a_clip():
    data = stale(7)
    wide = {"clip_ratio_low": 1e9, "clip_ratio_high": 1e9, "clip_ratio_c": 1e12}
    of_rollout = data | {"old_log_probs": data["rollout_log_probs"]}
    found = evaluate("m2po", data, config=actor("m2po", {"m2_threshold": 1e9}))
    expected = evaluate("vanilla", of_rollout, config=actor(**wide))
    assert_close(found[0], expected[0])
    assert_close(found[2], expected[2])


# ---- DeepSeek-V3.2: which responses stay, and the divergence -------------------------------------


def test_the_off_policy_sequence_mask_by_hand():
    # means of log μ/π: row 1 (ln 2 + 0)/2 = 0.347; row 2 ln 2, one token; row 3 -ln 2
    sampled = tensor([[0.8, 0.5], [0.8, 0.9], [0.4, 0.5]]).log()
    new = tensor([[0.4, 0.5], [0.4, 0.1], [0.8, 0.5]]).log()
    advantages = tensor([[-1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]])
    mask = tensor([[1, 1], [1, 0], [1, 1]])

    def found(threshold: float) -> list:
        return off_policy_sequence_mask(new, sampled, advantages, mask, threshold).int().tolist()

    assert found(0.3) == [[0, 1], [0, 0], [1, 1]]  # a token with A > 0 stays in any case
    assert found(0.5) == [[1, 1], [0, 0], [1, 1]]
    assert found(0.7) == [[1, 1], [1, 1], [1, 1]]


def policy_loss(data: dict[str, Tensor], config: ActorConfig) -> tuple[Tensor, dict]:
    """The gradient of the worker's loss by the log-probs, and its metrics."""
    columns = {name: column for name, column in data.items() if name != "log_probs"}
    log_probs = data["log_probs"].clone().requires_grad_()
    tokens, rows = int(data["response_mask"].sum()), len(data["log_probs"])
    totals = BatchTotals(dp_size=1, batch_num_tokens=tokens, global_batch_size=rows)
    loss, metrics = PolicyLoss(config)({"log_probs": log_probs}, DataProto.from_dict(tensors=columns), totals)
    loss.backward()
    assert log_probs.grad is not None
    return log_probs.grad, metrics


def test_masked_responses_leave_the_policy_loss_and_keep_their_divergence():
    data = stale(10, spread=0.8, per_row=True)
    shared = {"loss_agg_mode": "token-sum", "use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k2"}
    with_mask, metrics = policy_loss(data, actor("vanilla", {"off_policy_mask_threshold": 0.1}, **shared))
    without, _ = policy_loss(data, actor("vanilla", **shared))
    divergence = 0.5 * (data["log_probs"] - data["ref_log_prob"]) * data["response_mask"]
    gap = (data["rollout_log_probs"] - data["log_probs"]) * data["response_mask"]
    far = gap.sum(-1) / data["response_mask"].sum(-1).clamp(min=1) > 0.1
    gone = far & (data["advantages"][:, 0] < 0) & data["response_mask"].any(-1)
    assert 0 < gone.sum() < len(gone)
    assert_close(with_mask[gone], divergence[gone])
    assert_close(with_mask[~gone], without[~gone])
    share = data["response_mask"][gone].sum() / data["response_mask"].sum()
    assert metrics["actor/off_policy_masked_fraction"].item() == pytest.approx(share.item())


def test_the_corrected_divergence_has_the_gradient_of_the_kl_on_samples_of_another_policy():
    """Summed over all words of a small vocabulary, which is the mean over samples of π_old."""
    logits = tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    old, ref = (tensor(x, dtype=torch.float64).log_softmax(0) for x in ([0.9, 0.0, 0.1, -0.5], [0.0, 0.2, -0.3, 1.0]))
    exact = torch.nn.functional.kl_div(ref, logits.log_softmax(0), log_target=True, reduction="sum")
    (expected,) = torch.autograd.grad(exact, logits)
    for kind in ("k1", "k3"):
        log_probs = logits.log_softmax(0)
        estimate = bias_corrected_kl(kl_penalty(log_probs, ref, kind), log_probs, old)
        value = (old.exp() * estimate).sum()
        assert_close(value, exact)
        assert_close(torch.autograd.grad(value, logits)[0], expected)
        plain = (old.exp() * kl_penalty(logits.log_softmax(0), ref, kind)).sum()
        assert (torch.autograd.grad(plain, logits)[0] - expected).abs().max() > 0.05


def test_on_policy_the_corrected_k3_has_the_gradient_of_k2():
    data = batch(9, spread=0.0)
    found, expected = (
        policy_loss(
            data | {"advantages": torch.zeros_like(data["advantages"])},
            actor(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, use_bias_correction_kl=corrected),
        )[0]
        for kind, corrected in (("k3", True), ("k2", False))
    )
    assert_close(found, expected)
    weights = torch.rand(data["advantages"].shape, dtype=torch.float64)
    weighted, _ = policy_loss(
        data | {"advantages": torch.zeros_like(weights), "rollout_is_weights": weights},
        actor(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k3", use_bias_correction_kl=True),
    )
    assert_close(weighted, expected * weights)


# ---- ECHO: cross entropy of what the environment wrote ------------------------------------------


def test_observed_tokens_by_hand():
    # rows: two turns with an answer of two tokens between them; one turn and padding; no turn that is trained on
    mask = tensor([[1, 0, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    attention = tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    # the last token of row 0 was drawn, and is not trained on; the third of row 1 was not
    versions = tensor([[0, -1, -1, 0, 0], [0, 0, -1, -1, -1], [-1, -1, 0, 0, 0]])
    third = 1 / 3
    expected = [[0.0, third, third, 0.0, 0.0], [0.0, 0.0, third, 0.0, 0.0], [0.0] * 5]
    assert_close(observation_weights(mask, attention, versions), tensor(expected))
    assert observation_weights(mask[2:], attention[2:], versions[2:]).sum() == 0


def test_echo_adds_its_cross_entropy_and_changes_nothing_else():
    data = batch(11)
    off = ~data["response_mask"].bool()
    weights = off.double() / off.sum()
    plain, _ = policy_loss(data, actor())
    gradient, metrics = policy_loss(
        data | {"observation_weights": weights}, actor(use_echo_loss=True, echo_loss_coef=0.3)
    )
    assert_close(gradient, plain - 0.3 * weights)
    assert metrics["actor/echo_loss"].value.item() == pytest.approx(-data["log_probs"][off].mean().item())


@pytest.mark.parametrize("packed", [True, False])
def test_the_model_is_read_where_the_environment_wrote(packed: bool):
    mask = tensor([[1, 0, 1], [1, 0, 0]])
    columns = {
        "input_ids": tensor([[0, 5, 6, 7, 8], [4, 5, 9, 0, 0]]),
        "attention_mask": tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "position_ids": tensor([[0, 0, 1, 2, 3], [0, 1, 2, 2, 2]]),
        "responses": tensor([[6, 7, 8], [9, 0, 0]]),
        "response_mask": mask,
    }
    weights = tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    without, inputs = (
        prepare_inputs(DataProto.from_dict(tensors=columns | more), packed, torch.device("cpu"))
        for more in ({}, {"observation_weights": weights})
    )
    assert without.targets.tolist() == [6, 8, 9]
    assert inputs.targets.tolist() == [6, 7, 8, 9]
    read = inputs.input_ids.flatten()[inputs.take]
    assert read.tolist() == [5, 6, 7, 5]  # the token before each
