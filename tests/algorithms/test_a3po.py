"""The proximal policy by interpolation (A-3PO): by hand, slow oracle, reductions, gradients, masks, layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.workers.support import EPS, LAYOUTS, LR, make_engine, naive_outputs, ragged_batch, weights_of
from verl.algorithms.rollout_correction import ProximalPolicy, interpolated_policy, interpolation_factor
from verl.config import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.workers.engine import BatchTotals
from verl.workers.losses import InterpolatedLoss, PolicyLoss

F64 = torch.float64


def a3po(**changes: Any) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(prox_logp_method="loglinear", **changes)


def test_the_factor_by_hand():
    # d / (d + 1): the weight of the policy that drew the token is 1/(d + 1). -1 is no token of the policy.
    found = interpolation_factor(tensor([[0, 1, 2, 4, -1]], dtype=torch.int32))
    assert_close(found, tensor([[0.0, 1 / 2, 2 / 3, 4 / 5, 0.0]], dtype=F64))


# The policy that sampled gave ½ to every token; the current one gives 16 times as much to the second and third, a
# quarter to the last. Probabilities above 1 make the powers plain.
MU = torch.full((1, 4), 0.5, dtype=F64).log()
PI = tensor([[8.0, 8.0, 8.0, 0.125]], dtype=F64).log()
AGE, MASK = tensor([[0, 1, 3, 1]], dtype=torch.int32), torch.ones(1, 4, dtype=torch.int64)


def test_policy_and_weights_by_hand():
    found = interpolated_policy(PI, MU, AGE, MASK, a3po(rollout_is="token", rollout_is_threshold=3.0))
    # 16^α is 1, 4, 8 with α = 0, ½, ¾; ¼^½ is ½.
    assert_close(found.log_probs.exp(), tensor([[0.5, 2.0, 4.0, 0.25]], dtype=F64))
    assert found.weights is not None
    assert_close(found.weights, tensor([[1.0, 3.0, 3.0, 0.5]], dtype=F64))  # 4 and 8 are capped
    assert_close(found.metrics["rollout_corr/rollout_is_max"], tensor([[1.0, 4.0, 8.0, 0.5]], dtype=F64))
    assert_close(found.metrics["rollout_corr/prox_alpha"], tensor([[0.0, 0.5, 0.75, 0.5]], dtype=F64))
    sequence = interpolated_policy(PI, MU, AGE, MASK, a3po(rollout_is="sequence", rollout_is_threshold=100.0)).weights
    assert sequence is not None
    assert_close(sequence, torch.full((1, 4), 16.0, dtype=F64))  # 1 · 4 · 8 · ½
    icepop = interpolated_policy(PI, MU, AGE, MASK, a3po(rollout_is="token", rollout_is_threshold="0.6_5.0")).weights
    assert icepop is not None
    assert_close(icepop, tensor([[1.0, 4.0, 0.0, 0.0]], dtype=F64))
    rejecting = a3po(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=4.5)
    kept = interpolated_policy(PI, MU, AGE, MASK, rejecting).weights
    assert kept is not None
    assert_close(kept, tensor([[1.0, 2.0, 0.0, 0.5]], dtype=F64))
    assert interpolated_policy(PI, MU, AGE, MASK, a3po()).weights is None


ACTOR = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0, "entropy_coeff": 0.0}


def actor(**changes: Any) -> ActorConfig:
    own = {"policy_loss": PolicyLossConfig(**changes.pop("policy_loss", {}))}
    return ActorConfig(**ACTOR | own | changes)


def data(seed: int = 0, rows: int = 4, width: int = 5) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=g) < 0.8).long()
    mu = -torch.rand(rows, width, generator=g, dtype=F64) * 3
    return {
        "log_probs": mu + 0.6 * torch.randn(rows, width, generator=g, dtype=F64),
        "rollout_log_probs": mu,
        "advantages": torch.randn(rows, width, generator=g, dtype=F64),
        "updates_behind": torch.randint(0, 5, (rows, width), generator=g, dtype=torch.int32).masked_fill(mask == 0, -1),
        "response_mask": mask,
    }


def loss_of(
    columns: dict[str, Tensor], correction: RolloutCorrectionConfig, config: ActorConfig | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """As a worker computes it, of a mini-batch in one micro-batch; a token mean."""
    mask, log_probs = columns["response_mask"], columns["log_probs"]
    totals = BatchTotals(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=len(mask))
    batch = DataProto.from_dict(tensors={key: value.detach() for key, value in columns.items() if key != "log_probs"})
    loss = InterpolatedLoss(PolicyLoss(config or actor()), correction)
    return loss({"log_probs": log_probs}, batch, totals)


def slow_loss(columns: dict[str, Tensor], cap: float) -> float:
    """The definition, one token after the other: sg[min(π_prox/π_b, C)] · clip(π_θ/π_prox)."""
    total, count = 0.0, 0
    rows = zip(*(columns[key].tolist() for key in columns), strict=True)
    for log_p, log_b, adv, age, mask in (one for row in rows for one in zip(*row, strict=True)):
        if not mask:
            continue
        count += 1
        proximal = log_b / (age + 1) + log_p * age / (age + 1)
        ratio, weight = math.exp(log_p - proximal), min(math.exp(proximal - log_b), cap)
        surrogate = max(-adv * ratio, -adv * min(max(ratio, 0.8), 1.3))
        total += weight * (min(surrogate, -adv * 3.0) if adv < 0 else surrogate)
    return total / max(count, 1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_against_the_slow_form(seed: int):
    columns = data(seed)
    loss, metrics = loss_of(columns, a3po(rollout_is="token", rollout_is_threshold=1.5))
    assert loss.item() == pytest.approx(slow_loss(columns, 1.5), rel=1e-9, abs=1e-12)
    shares = interpolation_factor(columns["updates_behind"])[columns["response_mask"].bool()]
    assert metrics["rollout_corr/prox_alpha"].item() == pytest.approx(shares.mean().item() if len(shares) else 0.0)


def test_reductions():
    """Of age 0 it is the clip against the policy that sampled; if nothing has changed, PPO's first step at any age."""
    columns = data(1)
    fresh = columns | {"updates_behind": columns["updates_behind"].clamp(max=0)}
    bypass = RolloutCorrectionConfig(bypass_mode=True)
    loss, metrics = loss_of(fresh, a3po(rollout_is="token"))
    mask = columns["response_mask"]
    batch = DataProto.from_dict(tensors=fresh | {"old_log_probs": fresh["rollout_log_probs"]})
    totals = BatchTotals(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=len(mask))
    as_bypass = actor(policy_loss={"loss_mode": "bypass_mode", "rollout_correction": bypass})
    expected, others = PolicyLoss(as_bypass)({"log_probs": columns["log_probs"]}, batch, totals)
    assert_close(loss, expected)
    for name in ("actor/pg_clipfrac", "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token"):
        assert_close(metrics[name], others[name], check_dtype=False)
    same = columns | {"log_probs": columns["rollout_log_probs"]}
    loss, metrics = loss_of(same, a3po(rollout_is="token"))
    assert_close(loss, -(columns["advantages"] * mask).sum() / mask.sum())
    assert metrics["actor/pg_clipfrac"] == 0
    # The older the token, the nearer the proximal policy to the current one: then only the weight is left.
    old = columns | {"updates_behind": torch.full_like(columns["updates_behind"], 10**6)}
    weights = (columns["log_probs"] - columns["rollout_log_probs"]).exp().clamp(max=2.0)
    loss, _ = loss_of(old, a3po(rollout_is="token"))
    assert_close(loss, -(weights * columns["advantages"] * mask).sum() / mask.sum(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("correction", [a3po(), a3po(rollout_is="token"), a3po(rollout_is="sequence")])
def test_gradient_against_finite_differences(correction: RolloutCorrectionConfig):
    """Proximal policy and weights are constants: of the loss with both held fixed."""
    columns, config = data(2, rows=3, width=4), actor()
    log_probs = columns["log_probs"].clone().requires_grad_()
    loss_of(columns | {"log_probs": log_probs}, correction)[0].backward()
    mask = columns["response_mask"]
    fixed = interpolated_policy(
        *(columns[k] for k in ("log_probs", "rollout_log_probs", "updates_behind")), mask, correction
    )
    totals = BatchTotals(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=len(mask))
    made = {
        "old_log_probs": fixed.log_probs,
        **({} if fixed.weights is None else {"rollout_is_weights": fixed.weights}),
    }
    batch = DataProto.from_dict(tensors={"advantages": columns["advantages"], "response_mask": mask, **made})

    def held(values: Tensor) -> float:
        return PolicyLoss(config)({"log_probs": values}, batch, totals)[0].item()

    expected, step = torch.zeros_like(log_probs), 1e-6
    for place in mask.nonzero().tolist():
        up, down = columns["log_probs"].clone(), columns["log_probs"].clone()
        up[tuple(place)] += step
        down[tuple(place)] -= step
        expected[tuple(place)] = (held(up) - held(down)) / (2 * step)
    assert log_probs.grad is not None
    assert_close(log_probs.grad, expected, atol=1e-8, rtol=1e-6)
    assert log_probs.grad.abs().sum() > 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_places_are_never_read(garbage: float):
    correction = a3po(rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.5)
    clean, expected = data(3), loss_of(data(3), correction)
    masked = clean["response_mask"] == 0
    dirty = {k: v.masked_fill(masked, garbage) if v.is_floating_point() else v for k, v in clean.items()}
    log_probs = dirty["log_probs"].clone().requires_grad_()
    loss, metrics = loss_of(dirty | {"log_probs": log_probs}, correction)
    assert_close(loss, expected[0])
    assert {k: float(v) for k, v in metrics.items() if isinstance(v, Tensor)} == pytest.approx(
        {k: float(v) for k, v in expected[1].items() if isinstance(v, Tensor)}
    )
    loss.backward()
    assert log_probs.grad is not None
    assert (log_probs.grad[masked] == 0).all()


def test_everything_rejected_is_no_loss_and_no_gradient():
    columns = data(4)
    log_probs = columns["log_probs"].clone().requires_grad_()
    correction = a3po(rollout_is="token", rollout_rs="token_k3", rollout_rs_threshold=1e-12)
    older = {"updates_behind": torch.full_like(columns["updates_behind"], 3)}
    loss, metrics = loss_of(columns | older | {"log_probs": log_probs}, correction)
    loss.backward()
    assert loss.item() == 0
    assert log_probs.grad is not None
    assert (log_probs.grad == 0).all()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1


def test_what_it_cannot_do():
    columns = data(5)
    with pytest.raises(ConfigError, match="rollout_is_batch_normalize=true cannot be used with prox_logp_method"):
        loss_of(columns, a3po(rollout_is="token", rollout_is_batch_normalize=True))
    with pytest.raises(SchemaError, match="'updates_behind' is made by the source of experience"):
        loss_of({key: value for key, value in columns.items() if key != "updates_behind"}, a3po())


# ---- a step of the engine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_step_of_any_layout_is_that_of_a_recomputation_in_float64(path: str, level: Any):
    batch, config = ragged_batch(), actor(loss_agg_mode="token-mean")
    model = AutoModelForCausalLM.from_pretrained(path).double()
    log_probs, _ = naive_outputs(model, batch)
    assert log_probs.dtype == F64
    columns = {name: batch.batch[name] for name in ("advantages", "response_mask")}
    mask = columns["response_mask"]
    age = torch.arange(mask.numel(), dtype=torch.int32).view_as(mask) % 4
    drawn = (log_probs.detach() + batch.batch["noise"]).float()
    columns |= {"rollout_log_probs": drawn, "updates_behind": age.to(torch.int32)}
    # The definition, with its own sums: of token ratios, or of the product over a response.
    gap, alpha = (log_probs.detach() - drawn.double()) * mask, age.double() / (age + 1)
    moved = alpha * gap
    exponent = moved if level == "token" else moved.sum(-1, keepdim=True).expand_as(moved)
    weights, ratio = exponent.exp().clamp(max=2.0), (log_probs - (drawn + moved)).exp()
    A = columns["advantages"].double()
    surrogate = torch.maximum(-A * ratio, -A * ratio.clamp(0.8, 1.3))
    surrogate = torch.where(A < 0, torch.minimum(surrogate, -A * 3.0), surrogate)
    expected = (weights * surrogate * mask).sum() / mask.sum()
    expected.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, eps=EPS)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    after = dict(model.named_parameters())

    loss = InterpolatedLoss(PolicyLoss(config), a3po(rollout_is=level))
    for layout in ("whole", "one by one", "by tokens"):
        engine = make_engine(path)
        before = weights_of(engine)
        with engine.train_mode():
            metrics = engine.train_batch(batch | DataProto.from_dict(tensors=columns), loss, LAYOUTS[layout])
        assert metrics["actor/pg_loss"] == pytest.approx(expected.item(), abs=1e-6)
        assert metrics["rollout_corr/prox_alpha"] == pytest.approx(alpha[mask.bool()].mean().item(), abs=1e-6)
        for name, weight in weights_of(engine).items():
            assert_close(weight.double(), after[name].detach(), atol=1e-6, rtol=0)
            assert (weight - before[name]).abs().max() > 1e-4


def test_the_proximal_policy_has_the_dtype_of_the_current_one():
    columns = {k: v.float() if v.is_floating_point() else v for k, v in data(6).items()}
    found: ProximalPolicy = interpolated_policy(
        columns["log_probs"], columns["rollout_log_probs"], columns["updates_behind"], columns["response_mask"],
        a3po(rollout_is="token"),
    )  # fmt: skip
    assert found.weights is not None
    assert (found.log_probs.dtype, found.weights.dtype) == (torch.float32, torch.float32)
