"""Each policy loss on numbers worked by hand, against its definition token by token, and what it reduces to."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.testing import assert_close

from tests.support.losses import actor, batch, evaluate
from verl.algorithms import prepare_policy_loss
from verl.algorithms.policy_losses import (
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
    compute_policy_loss_luspo,
)
from verl.algorithms.policy_losses.covariance import token_covariance
from verl.algorithms.policy_losses.token import binary_kl, total_variation
from verl.errors import ConfigError, SchemaError
from verl.workers.config import ActorConfig

LN2 = math.log(2)


def rows(old: list, new: list, advantages: list, mask: list | None = None) -> dict[str, Tensor]:
    """A mini-batch from probabilities."""
    data = {
        "old_log_probs": torch.tensor(old, dtype=torch.float64).log(),
        "log_probs": torch.tensor(new, dtype=torch.float64).log(),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
    }
    return data | {"response_mask": torch.ones_like(data["advantages"]).long() if mask is None else tensor(mask)}


def value(
    name: str, data: dict[str, Tensor], mode: str = "token-sum", own: dict | None = None, **changes: float
) -> float:
    return evaluate(name, data, mode, actor(name, own, loss_agg_mode=mode, **changes))[0].item()


# ---- ratios of a response -----------------------------------------------------------------------

TWO = rows(
    [[0.4, 0.2], [0.5, 0.5]],
    [[0.8, 0.1], [0.25, 0.9]],  # log-ratios ln 2, -ln 2: s = 1; and -ln 2 on one token: s = 1/2
    [[3.0, 3.0], [-2.0, -2.0]],
    [[1, 1], [1, 0]],
)


@pytest.mark.proof("by hand", "gspo")
def test_gspo_by_hand():
    # row 1: s = 1, loss -3 on two tokens. Row 2: s = 1/2, A < 0, clipped at 1 - 0.2: 2·0.8 = 1.6 on one.
    assert value("gspo", TWO, "token-sum") == pytest.approx(2 * -3 + 1.6)
    assert value("gspo", TWO, "seq-mean-token-mean") == pytest.approx((-3 + 1.6) / 2)
    assert value("gspo", TWO, "token-mean") == pytest.approx((-6 + 1.6) / 3)
    # not clipped with ε_low = 0.6: 2·0.5
    assert value("gspo", TWO, "seq-mean-token-mean", clip_ratio_low=0.6) == pytest.approx((-3 + 1.0) / 2)
    _, metrics, gradient = evaluate("gspo", TWO, "seq-mean-token-mean")
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(1 / 3)
    # -A·s/|y|/B on row 1; nothing on row 2, which is clipped
    assert_close(gradient, tensor([[-0.75, -0.75], [0.0, 0.0]], dtype=torch.float64))


@pytest.mark.proof("by hand", "luspo")
def test_luspo_by_hand():
    # mean over responses of length times loss: (2·(-3) + 1·1.6) / 2
    assert value("luspo", TWO, "seq-mean-token-sum") == pytest.approx((-6 + 1.6) / 2)
    assert value("luspo", TWO, "token-mean") == pytest.approx((-6 + 1.6) / 3)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "prompt-mean"])
def test_luspo_refuses_modes_that_divide_by_lengths(mode: str):
    ones = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=f"loss_agg_mode='{mode}': it would divide out.*Use seq-mean-token-sum"):
        compute_policy_loss_luspo(ones, ones, ones, ones, mode, actor("luspo"))


@pytest.mark.proof("by hand", "geo_mean")
def test_geo_mean_by_hand():
    # row 1, A > 0: ln 2 cut to 0.3, -ln 2 stays. Row 2, A < 0: -ln 2 cut to -0.2.
    s, cut = math.exp((0.3 - LN2) / 2), math.exp(-0.2)
    assert value("geo_mean", TWO, "seq-mean-token-mean") == pytest.approx((-3 * s + 2 * cut) / 2)
    assert value("geo_mean", TWO, "token-sum") == pytest.approx(-6 * s + 2 * cut)
    _, metrics, gradient = evaluate("geo_mean", TWO, "seq-mean-token-mean")
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(1 / 3)
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(1 / 3)
    only_above = evaluate("geo_mean", rows([[0.4]], [[0.8]], [[1.0]]))[1]
    assert (only_above["actor/pg_clipfrac"], only_above["actor/pg_clipfrac_lower"]) == (1.0, 0.0)
    # only the second token of row 1 is inside its bounds: -A·s/|y|/B
    assert_close(gradient, tensor([[0.0, -3 * s / 4], [0.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_the_ratio_of_a_response_is_bounded(name: str):
    # mean log-ratio 12, A < 0 so that no clip stops it: cut at e^10, without gradient. At 9 nothing is cut.
    far, near = (rows([[math.exp(-d - 1)]], [[math.exp(-1)]], [[-1.0]]) for d in (12.0, 9.0))
    loss, _, gradient = evaluate(name, far)
    assert (loss.item(), gradient.item()) == (pytest.approx(math.exp(10)), 0.0)
    loss, _, gradient = evaluate(name, near)
    assert (loss.item(), gradient.item()) == (pytest.approx(math.exp(9)), pytest.approx(math.exp(9)))


# ---- one token ----------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "sapo")
@pytest.mark.parametrize(
    ("old", "new", "advantage", "loss", "gradient"),
    [
        # σ(0) = 1/2, ·4/τ: the loss is -2A/τ, the gradient -A·r
        (0.5, 0.5, 1.0, -2.0, -1.0),
        (0.5, 0.5, -1.0, 2 / 1.05, 1.0),
        # r = 2: σ(1)·4 = 2.924234; slope 4·r·σ(1)(1 - σ(1)) = 8·0.196612 = 1.572896
        (0.4, 0.8, 1.0, -2.924234, -1.572896),
        # r = 1/2: σ(-0.525)·4/1.05 = 0.371684·3.809524; slope 4·½·0.371684·0.628316
        (0.8, 0.4, -1.0, 1.415938, 0.467069),
    ],
)
def test_sapo_by_hand(old: float, new: float, advantage: float, loss: float, gradient: float):
    found, _, slope = evaluate("sapo", rows([[old]], [[new]], [[advantage]]))
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert slope.item() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.proof("by hand", "gpg")
def test_gpg_by_hand():
    # -(2·ln ¼ + (-1)·ln ½)
    assert value("gpg", rows([[0.5, 0.5]], [[0.25, 0.5]], [[2.0, -1.0]])) == pytest.approx(4 * LN2 - LN2)


@pytest.mark.proof("by hand", "cispo")
@pytest.mark.parametrize(
    ("old", "new", "advantage", "weight"),
    [
        (0.4, 0.8, 1.0, 1.3),  # r = 2, cut at 1.3 and still with gradient
        (0.8, 0.4, 1.0, 0.8),  # r = ½, raised to 0.8
        (0.4, 0.44, -1.0, 1.1),
    ],
)
def test_cispo_by_hand(old: float, new: float, advantage: float, weight: float):
    loss, metrics, gradient = evaluate("cispo", rows([[old]], [[new]], [[advantage]]))
    assert loss.item() == pytest.approx(-weight * advantage * math.log(new))
    assert gradient.item() == pytest.approx(-weight * advantage)
    assert metrics["actor/pg_clipfrac"] == (weight == 1.3)
    assert metrics["actor/pg_clipfrac_lower"] == (weight == 0.8)


@pytest.mark.proof("by hand", "dppo_tv")
@pytest.mark.parametrize(
    ("old", "new", "advantage", "weight"),
    [
        (0.1, 0.3, 1.0, 3.0),  # |π - π_old| = 0.2 <= 0.3: r = 3 counts in full, where PPO would stop
        (0.1, 0.5, 1.0, 0.0),  # 0.4 > 0.3, outward: stopped
        (0.1, 0.5, -1.0, 3.0),  # outward for A > 0 only; r = 5 cut at c = 3
        (0.9, 0.6, -1.0, 0.0),  # 0.3 > 0.2 outward: stopped
        (0.9, 0.6, 1.0, 2 / 3),  # moves back
        (0.9, 0.75, -1.0, 5 / 6),  # 0.15 <= 0.2
    ],
)
def test_dppo_tv_by_hand(old: float, new: float, advantage: float, weight: float):
    loss, metrics, gradient = evaluate("dppo_tv", rows([[old]], [[new]], [[advantage]]))
    assert gradient.item() == pytest.approx(-weight * advantage)
    assert loss.item() == pytest.approx(-weight * advantage * math.log(new))
    assert metrics["actor/pg_clipfrac"] == (weight == 0.0)


@pytest.mark.proof("by hand", "dppo_kl")
@pytest.mark.parametrize(
    ("old", "new", "advantage", "weight"),
    [
        # ½·ln(½/0.8) + ½·ln(½/0.2) = -0.235002 + 0.458145 = 0.223144 nats
        (0.5, 0.8, 1.0, 1.6),  # <= 0.3
        (0.5, 0.2, -1.0, 0.0),  # the same distance, > 0.2 and outward
        (0.5, 0.2, 1.0, 0.4),  # moves back
        (0.5, 0.9, 1.0, 0.0),  # ½·ln(½/0.9) + ½·ln(½/0.1) = -0.293893 + 0.804719 = 0.510826 > 0.3
    ],
)
def test_dppo_kl_by_hand(old: float, new: float, advantage: float, weight: float):
    _, _, gradient = evaluate("dppo_kl", rows([[old]], [[new]], [[advantage]]))
    assert gradient.item() == pytest.approx(-weight * advantage)


def test_binary_divergences_by_hand():
    p, q = tensor([0.8, 0.9, 1.0, 0.5]).log(), tensor([0.5, 0.5, 1.0, 1.0]).log()
    assert_close(total_variation(p, q), tensor([0.3, 0.4, 0.0, 0.5]))
    # the third: no difference; the fourth: 1·ln(1/½) + 0
    assert_close(binary_kl(p, q), tensor([0.223144, 0.510826, 0.0, LN2]), atol=1e-6, rtol=1e-5)
    assert binary_kl(tensor(0.0), tensor(0.5).log()) > 40  # π = 1 where π_old is not: off all scales
    tiny = tensor([-1e-7]), tensor([-2e-7])  # 1 - π of 1e-7 is not lost to rounding
    assert_close(binary_kl(*tiny), tensor([2e-7 * LN2 - 1e-7]), rtol=1e-2, atol=0)


@pytest.mark.proof("by hand", "dro")
def test_dro_by_hand():
    # Δ = ln 2, β = ½: -(3·ln 0.8 - ½·½·ln²2); gradient -(3 - ½·ln 2)
    loss, metrics, gradient = evaluate("dro", rows([[0.4]], [[0.8]], [[3.0]]))
    assert loss.item() == pytest.approx(-(3 * math.log(0.8) - 0.25 * LN2**2))
    assert gradient.item() == pytest.approx(-(3 - 0.5 * LN2))
    assert metrics["actor/dro_penalty"].item() == pytest.approx(0.25 * LN2**2)


def test_dro_rests_where_the_leash_is_taut():
    # β·Δ = A: ½·Δ = ½·ln 2
    _, _, gradient = evaluate("dro", rows([[0.4]], [[0.8]], [[0.5 * LN2]]))
    assert gradient.item() == pytest.approx(0.0, abs=1e-12)


def test_dro_needs_its_beta():
    with pytest.raises(ConfigError, match=r"the dro policy loss needs dro_beta"):
        evaluate("dro", batch(0), config=actor("dro", {"dro_beta": None}))


# ---- tokens chosen by covariance ----------------------------------------------------------------

# log-probs -1 -2 -3 -4, mean -2.5; advantages 4 0 0 0, mean 1
# cov: 1.5·3 = 4.5, 0.5·(-1) = -0.5, -0.5·(-1) = 0.5, -1.5·(-1) = 1.5
COV = {
    "old_log_probs": tensor([[-1.0, -2.0, math.nan], [-3.0, -4.0, 0.0]]),
    "advantages": tensor([[4.0, 0.0, math.inf], [0.0, 0.0, math.nan]]),
    "response_mask": tensor([[1, 1, 0], [1, 1, 0]]),
}


def test_covariance_by_hand():
    cov = token_covariance(COV["old_log_probs"], COV["advantages"], COV["response_mask"])
    assert_close(cov[COV["response_mask"].bool()], tensor([4.5, -0.5, 0.5, 1.5], dtype=torch.float64))


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.0, [[0, 0, 0], [0, 0, 0]]),
        (0.25, [[1, 0, 0], [0, 0, 0]]),  # 1 of 4
        (0.001, [[1, 0, 0], [0, 0, 0]]),  # at least one
        (0.5, [[1, 0, 0], [0, 1, 0]]),
        (0.99, [[1, 0, 0], [1, 1, 0]]),  # 3.96, rounded down
        (1.0, [[1, 1, 0], [1, 1, 0]]),
    ],
)
def test_kl_cov_selects_the_largest(ratio: float, expected: list):
    made = prepare_policy_loss("kl_cov", COV, actor("kl_cov", {"kl_cov_ratio": ratio}), seed=0)
    assert made["cov_selected"].tolist() == expected


def test_clip_cov_draws_among_those_between_its_bounds():
    own = {"clip_cov_ratio": 0.25, "clip_cov_lb": 0.0, "clip_cov_ub": 2.0}
    config = actor("clip_cov", own)
    drawn = [
        tuple(prepare_policy_loss("clip_cov", COV, config, seed)["cov_selected"].flatten().tolist())
        for seed in range(40)
    ]
    assert set(drawn) == {(0, 0, 0, 1, 0, 0), (0, 0, 0, 0, 1, 0)}  # covariances 0.5 and 1.5, one at a time
    assert drawn == [
        tuple(prepare_policy_loss("clip_cov", COV, config, seed)["cov_selected"].flatten().tolist())
        for seed in range(40)
    ]
    both = prepare_policy_loss("clip_cov", COV, actor("clip_cov", own | {"clip_cov_ratio": 1.0}), seed=0)
    assert both["cov_selected"].tolist() == [[0, 0, 0], [1, 1, 0]]
    none = prepare_policy_loss("clip_cov", COV, actor("clip_cov", own | {"clip_cov_ratio": 0.0}), seed=0)
    assert none["cov_selected"].sum() == 0


def test_masked_places_are_never_drawn():
    # Advantages negated: covariances -4.5 0.5 -0.5 -1.5. A masked place, read as 0, would have 2.5·1.
    columns = COV | {"advantages": -COV["advantages"]}
    config = actor("clip_cov", {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.0, "clip_cov_ub": 3.0})
    made = prepare_policy_loss("clip_cov", columns, config, seed=0)
    assert made["cov_selected"].tolist() == [[0, 1, 0], [0, 0, 0]]


def test_the_draw_does_not_depend_on_padding():
    config = actor("clip_cov")
    wide = {key: torch.nn.functional.pad(column, (0, 4)) for key, column in COV.items()}
    for seed in range(5):
        narrow = prepare_policy_loss("clip_cov", COV, config, seed)["cov_selected"]
        assert_close(prepare_policy_loss("clip_cov", wide, config, seed)["cov_selected"][:, :3], narrow)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_selection_names_the_column_it_lacks(name: str):
    columns = {key: value for key, value in COV.items() if key != "advantages"}
    with pytest.raises(SchemaError, match=f"policy loss '{name}' needs column 'advantages'"):
        prepare_policy_loss(name, columns, actor(name), seed=0)


@pytest.mark.proof("by hand", "clip_cov")
def test_clip_cov_by_hand():
    # ratios 2 (clipped at 1.3: -3.9), 1.1 (-3.3, selected: 0), ½ with A < 0 (clipped at 0.8: 1.6)
    data = rows([[0.4, 0.5, 0.8]], [[0.8, 0.55, 0.4]], [[3.0, 3.0, -2.0]])
    loss, metrics = compute_policy_loss_clip_cov(
        data["old_log_probs"], data["log_probs"], data["advantages"], data["response_mask"], "token-sum",
        actor("clip_cov"), cov_selected=tensor([[0, 1, 0]]),
    )  # fmt: skip
    assert loss.item() == pytest.approx(-3.9 + 1.6)
    assert metrics["actor/pg_clipfrac"] == 1.0
    assert metrics["actor/cov_selected_frac"] == pytest.approx(1 / 3)


@pytest.mark.proof("by hand", "kl_cov")
def test_kl_cov_by_hand():
    # -A·r = -6, -3.3, +1; + 0.7·ln 2 on the last
    data = rows([[0.4, 0.5, 0.8]], [[0.8, 0.55, 0.4]], [[3.0, 3.0, -2.0]])
    loss, metrics = compute_policy_loss_kl_cov(
        data["old_log_probs"], data["log_probs"], data["advantages"], data["response_mask"], "token-sum",
        actor("kl_cov"), cov_selected=tensor([[0, 0, 1]]),
    )  # fmt: skip
    assert loss.item() == pytest.approx(-6 - 3.3 + 1 + 0.7 * LN2)
    assert metrics["actor/cov_selected_frac"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_called_directly_it_selects_for_itself(name: str):
    data, config = batch(7), actor(name)
    compute = {"clip_cov": compute_policy_loss_clip_cov, "kl_cov": compute_policy_loss_kl_cov}[name]
    arguments = [data[key] for key in ("old_log_probs", "log_probs", "advantages", "response_mask")]
    prepared = prepare_policy_loss(name, data, config, seed=0)["cov_selected"]
    assert prepared.sum() > 0
    assert_close(
        compute(*arguments, "token-sum", config), compute(*arguments, "token-sum", config, None, cov_selected=prepared)
    )


# ---- against the definition, token by token -----------------------------------------------------


def slow(name: str, data: dict[str, Tensor], config: ActorConfig, chosen: Tensor | None) -> tuple[float, list]:
    """Sum of the losses over the tokens, and the gradient, of the definitions."""
    low, high, c, own = config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c, config.policy_loss
    total, gradient = 0.0, torch.zeros(data["advantages"].shape).tolist()
    for i in range(len(gradient)):
        valid = [t for t in range(len(gradient[i])) if data["response_mask"][i, t]]
        new, old, A = ({t: data[k][i, t].item() for t in valid} for k in ("log_probs", "old_log_probs", "advantages"))
        delta = {t: new[t] - old[t] for t in valid}
        mean = sum(delta.values()) / max(len(valid), 1)
        cut = {t: min(delta[t], high) if A[t] > 0 else max(delta[t], -low) for t in valid}
        geometric = sum(cut.values()) / max(len(valid), 1)
        for t in valid:
            token = TOKENS[name]
            selected = chosen is not None and bool(chosen[i, t])
            ratio = math.exp(max(-20, min(20, delta[t])))
            if name in ("gspo", "luspo"):
                ratio = math.exp(min(mean, 10.0))
            inside = cut[t] == delta[t]
            if name == "geo_mean":
                ratio = math.exp(min(geometric, 10.0))
            loss, slope = token(
                A=A[t], r=ratio, d=delta[t], new=new[t], old=old[t], low=low, high=high, c=c, own=own,
                selected=selected, inside=inside, config=config,
            )  # fmt: skip
            total += loss
            gradient[i][t] = slope
    return total, gradient


def ppo_token(A, r, low, high, **_):
    clipped = min(max(r, 1 - low), 1 + high)
    return (-A * r, -A * r) if -A * r >= -A * clipped else (-A * clipped, 0.0)


def dppo_token(distance: Callable[[float, float], float]):
    def token(A, r, new, old, low, high, c, **_):
        far = distance(math.exp(new), math.exp(old)) > (high if A > 0 else low)
        weight = 0.0 if far and (A > 0) == (r > 1) else min(r, c)
        return -weight * A * new, -weight * A

    return token


def kl_of(p: float, q: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def sapo_token(A, r, config, **_):
    tau = config.tau_pos if A > 0 else config.tau_neg
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -A * gate * 4 / tau, -A * 4 * gate * (1 - gate) * r


TOKENS: dict[str, Callable] = {
    "gspo": ppo_token,
    "luspo": ppo_token,
    "geo_mean": lambda A, r, inside, **_: (-A * r, -A * r if inside else 0.0),
    "sapo": sapo_token,
    "gpg": lambda A, new, **_: (-A * new, -A),
    "cispo": lambda A, r, new, low, high, **_: (
        -min(max(r, 1 - low), 1 + high) * A * new,
        -min(max(r, 1 - low), 1 + high) * A,
    ),
    "dppo_tv": dppo_token(lambda p, q: abs(p - q)),
    "dppo_kl": dppo_token(kl_of),
    "dro": lambda A, d, new, own, **_: (-(A * new - own.dro_beta / 2 * d**2), -(A - own.dro_beta * d)),
    "clip_cov": lambda selected, **x: (0.0, 0.0) if selected else ppo_token(**x),
    "kl_cov": lambda A, r, d, own, selected, **_: (
        -A * r + selected * own.ppo_kl_coef * abs(d),
        -A * r + selected * own.ppo_kl_coef * math.copysign(1, d),
    ),
}


@pytest.mark.proof("oracle", param="name")
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.05, 0.6, 2.0]))
@pytest.mark.parametrize("name", TOKENS)
def test_against_the_definition(name: str, seed: int, spread: float):
    data, config = batch(seed, spread=spread), actor(name)
    loss, _, gradient = evaluate(name, data, config=config, seed=seed)
    chosen = prepare_policy_loss(name, data, config, seed).get("cov_selected")
    expected, expected_gradient = slow(name, data, config, chosen)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert_close(gradient, torch.tensor(expected_gradient, dtype=torch.float64))


# ---- reductions ---------------------------------------------------------------------------------


def same(name: str, changes: dict, other: str, other_changes: dict, data: dict[str, Tensor], mode: str = "token-mean"):
    (loss, _, gradient), (expected, _, expected_gradient) = (
        evaluate(n, data, mode, actor(n, loss_agg_mode=mode, **c)) for n, c in ((name, changes), (other, other_changes))
    )
    assert_close(loss, expected)
    assert_close(gradient, expected_gradient)


NO_DUAL_CLIP = {"clip_ratio_c": 1e9}


@pytest.mark.proof("reductions", "gspo", "vanilla")
@pytest.mark.parametrize("seed", range(5))
def test_gspo_on_responses_of_one_token_is_ppo(seed: int):
    same("gspo", {}, "vanilla", NO_DUAL_CLIP, batch(seed, rows=20, width=1))


@pytest.mark.proof("reductions", "gspo", "geo_mean")
@pytest.mark.parametrize("seed", range(5))
def test_gspo_and_geo_mean_without_bounds_are_one(seed: int):
    data = batch(seed, per_row=True)
    wide = {"clip_ratio_low": 1e9, "clip_ratio_high": 1e9}
    same("gspo", wide, "geo_mean", wide, data, "seq-mean-token-mean")


@pytest.mark.proof("reductions", "luspo", "gspo")
@pytest.mark.parametrize("seed", range(5))
def test_luspo_on_equal_lengths_is_gspo_times_the_length(seed: int):
    data = batch(seed, width=4) | {"response_mask": torch.ones(6, 4).long()}
    loss, _, gradient = evaluate("luspo", data, "seq-mean-token-sum")
    expected, _, expected_gradient = evaluate("gspo", data, "seq-mean-token-mean")
    assert_close(loss, 4 * expected)
    assert_close(gradient, 4 * expected_gradient)


@pytest.mark.proof("reductions", "clip_cov")
@pytest.mark.parametrize("seed", range(5))
def test_clip_cov_without_a_choice_is_ppo(seed: int):
    (loss, _, gradient), (expected, _, expected_gradient) = (
        evaluate("clip_cov", batch(seed), config=actor("clip_cov", {"clip_cov_ratio": 0.0})),
        evaluate("vanilla", batch(seed), config=actor(**NO_DUAL_CLIP)),
    )
    assert_close(loss, expected)
    assert_close(gradient, expected_gradient)


@pytest.mark.proof("reductions", "kl_cov")
@pytest.mark.parametrize("own", [{"ppo_kl_coef": 0.0}, {"kl_cov_ratio": 0.0}])
def test_kl_cov_without_a_penalty_is_ppo_without_a_clip(own: dict):
    wide = {"clip_ratio_low": 1e9, "clip_ratio_high": 1e9, "clip_ratio_c": 1e12}
    (loss, _, gradient), (expected, _, expected_gradient) = (
        evaluate("kl_cov", batch(0), config=actor("kl_cov", own)),
        evaluate("vanilla", batch(0), config=actor(**wide)),
    )
    assert_close(loss, expected)
    assert_close(gradient, expected_gradient)


@pytest.mark.proof("reductions", param="name")
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "cispo"])
def test_without_bounds_it_is_the_importance_weighted_gradient(name: str):
    data = batch(1, spread=1.5)
    wide = actor(name, clip_ratio_low=1e9, clip_ratio_high=1e9, clip_ratio_c=1e9)
    ratio = (data["log_probs"] - data["old_log_probs"]).exp()
    assert_close(evaluate(name, data, config=wide)[2], -ratio * data["advantages"] * data["response_mask"])


@pytest.mark.proof("reductions", "cispo", "gpg")
def test_cispo_with_closed_bounds_is_gpg():
    same("cispo", {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0}, "gpg", {}, batch(2))


@pytest.mark.proof("reductions", "dro", "gpg")
def test_dro_with_a_small_beta_is_gpg():
    loss, _, gradient = evaluate("dro", batch(3), config=actor("dro", {"dro_beta": 1e-12}))
    expected, _, expected_gradient = evaluate("gpg", batch(3))
    assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-9)
