"""Tokens chosen by entropy, the weight that follows a target, and what is prepared for an update."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from tests.support.losses import actor, batch, groups
from verl.algorithms import (
    TargetEntropyController,
    get_entropy_controller,
    prepare_policy_loss,
    prepare_update,
    top_entropy_mask,
    update_columns,
)
from verl.errors import ConfigError, SchemaError
from verl.workers.config import ActorConfig

ENTROPYS = tensor([[0.1, 0.5, 9.0], [0.3, 0.2, math.nan], [0.4, 8.0, 7.0]])
MASK = tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("quantile", "expected"),
    [
        (1.0, [[1, 1, 0], [1, 1, 0], [1, 0, 0]]),
        # sorted 0.1 0.2 0.3 0.4 0.5; the 0.8-quantile is at place 0.8·4 = 3.2: 0.42
        (0.2, [[0, 1, 0], [0, 0, 0], [0, 0, 0]]),
        (0.5, [[0, 1, 0], [1, 0, 0], [1, 0, 0]]),  # place 2: 0.3, which ties and stays
        (0.4, [[0, 1, 0], [0, 0, 0], [1, 0, 0]]),  # place 2.4: 0.34
        (1e-9, [[0, 1, 0], [0, 0, 0], [0, 0, 0]]),  # the highest always stays
    ],
)
def test_the_top_by_hand(quantile: float, expected: list):
    assert top_entropy_mask(ENTROPYS, MASK, quantile).tolist() == expected


@pytest.mark.parametrize("entropy", [0.7, 0.0])
def test_equal_entropies_all_stay_and_masked_places_never(entropy: float):
    assert_close(top_entropy_mask(torch.full((3, 3), entropy), MASK, 0.2), MASK)


def test_nothing_valid_keeps_nothing():
    assert top_entropy_mask(ENTROPYS, torch.zeros_like(MASK), 0.2).sum() == 0


@pytest.mark.parametrize("quantile", [0.0, -0.1, 1.5])
def test_a_quantile_is_a_fraction(quantile: float):
    with pytest.raises(ConfigError, match="fraction of tokens to keep"):
        top_entropy_mask(ENTROPYS, MASK, quantile)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), quantile=st.floats(0.01, 1.0))
def test_at_least_the_fraction_stays_and_all_of_it_is_the_top(seed: int, quantile: float):
    data = batch(seed)
    kept, valid = top_entropy_mask(data["entropys"], data["response_mask"], quantile), data["response_mask"].bool()
    assert not kept[~valid].any()
    entropies, chosen = data["entropys"][valid], kept[valid].bool()
    if valid.any():
        assert 1 <= chosen.sum() <= quantile * len(chosen) + 1
        assert chosen.sum() >= math.floor(quantile * (len(chosen) - 1) + 1e-9)
        assert chosen.all() or entropies[~chosen].max() < entropies[chosen].min()


# ---- the controller -----------------------------------------------------------------------------


def test_the_weight_follows_its_target_by_hand():
    controller = TargetEntropyController(0.01, target=0.2, step=0.005, low=0.0, high=0.02)
    assert controller.value == 0.01
    seen = []
    for entropy in (0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.1):
        controller.update(entropy)
        seen.append(controller.value)
    # c: 0.01, 0.015, 0.02, 0.02 (bound), 0.02 (on target: in force, unchanged), 0.02 (above: off, then lowered), 0.015
    assert seen == pytest.approx([0.01, 0.015, 0.02, 0.02, 0.02, 0.0, 0.015])


def test_the_weight_does_not_wind_down_below_its_bound():
    controller = TargetEntropyController(0.01, target=0.2, step=0.005, low=0.0, high=1.0)
    for _ in range(100):
        controller.update(0.5)
    assert controller.value == 0.0
    controller.update(0.1)
    controller.update(0.1)
    assert controller.value == pytest.approx(0.005)


def test_a_resumed_controller_goes_on():
    first, second = (TargetEntropyController(0.01, 0.2, 0.005, 0.0, 1.0) for _ in range(2))
    for entropy in (0.1, 0.3, 0.1):
        first.update(entropy)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(0.1)
    assert first.value == second.value
    assert first.state_dict() == second.state_dict()


def test_the_controller_of_a_configuration():
    fixed = get_entropy_controller(ActorConfig(entropy_coeff=0.3))
    fixed.update(0.0)
    fixed.load_state_dict({"value": 9.0})
    assert fixed.value == 0.3
    found = get_entropy_controller(ActorConfig(entropy_coeff=3.0, entropy_target=0.2, entropy_coeff_max=0.5))
    assert (found.value, found.step) == (0.5, 0.005)
    with pytest.raises(ConfigError, match=r"entropy_coeff_min=0\.5 is above entropy_coeff_max=0\.1"):
        get_entropy_controller(ActorConfig(entropy_target=0.2, entropy_coeff_min=0.5, entropy_coeff_max=0.1))


# ---- what an update has to know of its mini-batch -----------------------------------------------


def columns() -> dict:
    return {**batch(3), "index": groups(6)}


def test_most_settings_need_nothing():
    assert prepare_update({}, actor(), seed=0) == {}
    assert update_columns(actor()) == frozenset()


def test_all_that_is_asked_for_is_prepared():
    config = actor("clip_cov", {"top_entropy_quantile": 0.5}, loss_agg_mode="prompt-mean")
    data = columns()
    made = prepare_update(data, config, seed=3)
    assert made.keys() == update_columns(config) == {"row_weights", "top_entropy_mask", "cov_selected"}
    assert_close(made["top_entropy_mask"], top_entropy_mask(data["entropys"], data["response_mask"], 0.5))
    assert_close(made["cov_selected"], prepare_policy_loss("clip_cov", data, config, 3)["cov_selected"])
    assert made["row_weights"].shape == (6,)


@pytest.mark.parametrize(
    ("config", "missing", "who"),
    [
        (actor("kl_cov"), "old_log_probs", "policy loss 'kl_cov' needs column 'old_log_probs'"),
        (actor(own={"top_entropy_quantile": 0.5}), "entropys", "top_entropy_quantile needs column 'entropys'"),
        (actor(loss_agg_mode="prompt-mean"), "index", "prompt-mean needs column 'uid'"),
    ],
)
def test_a_missing_column_is_named(config: ActorConfig, missing: str, who: str):
    data = {key: value for key, value in columns().items() if key != missing}
    with pytest.raises(SchemaError, match=who):
        prepare_update(data, config, seed=0)
