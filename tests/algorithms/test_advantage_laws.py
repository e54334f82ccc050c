"""What holds for every registered estimator, a later one too: its oracle, masks, edges, order, purity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from tests.support.estimators import ORACLES, SETTINGS, only_rows, oracle, random_batch
from verl.algorithms import adv_needs, compute_advantages, estimator_names, get_adv_estimator_fn

NAMES = estimator_names()
WHITENED = {"gae", "bi_level_gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"}
OTHER_BASELINES = {"grpo_passk", "optimal_token_baseline", "tir_optimal_token_baseline"}
"""Estimators that compare siblings otherwise than with a mean."""
GROUPED = [name for name in NAMES if "index" in adv_needs(name).columns]
every = pytest.mark.parametrize("name", NAMES)


def test_every_estimator_has_an_oracle():
    assert ORACLES.keys() == set(NAMES)


@pytest.mark.proof("oracle", param="name")
@every
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    width=st.integers(1, 8),
    density=st.floats(0, 1),
)
def test_equals_the_slow_form(name: str, seed: int, groups: list[int], width: int, density: float):
    batch = random_batch(seed, groups, width, density)
    advantages, _ = compute_advantages(name, batch, SETTINGS)
    assert_close(advantages.double(), oracle(name, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.proof("masks", param="name")
@every
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_places_are_never_read(name: str, garbage: float):
    clean = random_batch(1)
    clean["response_mask"][4] = 0
    dirty, off = dict(clean), clean["response_mask"] == 0
    for column, values in clean.items():
        if isinstance(values, torch.Tensor) and values.is_floating_point() and values.dim() == 2:
            dirty[column] = values.masked_fill(off, garbage)
    for key in SETTINGS["gdpo_reward_keys"]:
        dirty[key] = clean[key].copy()
        dirty[key][4] = None if math.isnan(garbage) else garbage
    expected, found = compute_advantages(name, clean, SETTINGS), compute_advantages(name, dirty, SETTINGS)
    assert_close(found, expected, rtol=0, atol=0)
    for column in found:
        assert torch.isfinite(column).all()
        assert (column[off] == 0).all()


@pytest.mark.proof("edges", param="name")
@every
def test_a_response_without_tokens_moves_nobody(name: str):
    batch = random_batch(2)
    batch["response_mask"][1] = 0
    rest = [0, 2, 3, 4, 5]
    for whole, without in zip(
        compute_advantages(name, batch, SETTINGS),
        compute_advantages(name, only_rows(batch, rest), SETTINGS),
        strict=True,
    ):
        assert (whole[1] == 0).all()
        assert_close(whole[rest], without)


@pytest.mark.proof("edges", param="name")
@every
def test_nothing_is_nothing(name: str):
    batch = random_batch(2)
    batch["response_mask"][:] = 0
    for column in compute_advantages(name, batch, SETTINGS):
        assert (column == 0).all()
    for column in compute_advantages(name, only_rows(batch, []), SETTINGS):
        assert column.shape == (0, 7)
    narrow = {k: v[:, :0] if isinstance(v, torch.Tensor) and v.dim() == 2 else v for k, v in batch.items()}
    for column in compute_advantages(name, narrow, SETTINGS):
        assert column.shape == (6, 0)


@pytest.mark.proof("edges", param="name")
@every
def test_a_single_token_is_finite(name: str):
    batch = random_batch(4, ["a"], width=1, density=1.1)
    for column in compute_advantages(name, batch, SETTINGS):
        assert torch.isfinite(column).all()


@pytest.mark.parametrize("name", sorted(set(GROUPED) - WHITENED - {"gpg"}))
@pytest.mark.proof("edges", param="name")
def test_a_group_of_one_keeps_its_own_reward(name: str):
    # Whatever the other groups earn. gpg scales by the batch, see there.
    batch = random_batch(5, ["a", "b", "b"], density=1.1)
    batch["token_level_rewards"] = torch.zeros(3, 7)
    batch["token_level_rewards"][:, -1] = tensor([3.0, 1.0, 0.0])
    advantages, _ = compute_advantages(name, batch, SETTINGS)
    assert_close(advantages[0], torch.full((7,), 3.0), rtol=1e-5, atol=0)


ROUNDED = {
    "response_mask": torch.ones(4, 20, dtype=torch.int64),
    # 20 times 0.7 is 14, and 0.1 + 0.2 - 0.3 is 0, but not in float32.
    "token_level_rewards": torch.stack(
        [torch.full((20,), 0.7), tensor([0.0] * 19 + [14.0]), tensor([0.1, 0.2, -0.3] + [0.0] * 17), torch.zeros(20)]
    ),
    "accuracy": np.array([0.1 + 0.2, 0.3, 0.7 * 20, 14.0], dtype=object),
    "format": np.array([1.0, 1.0, 0.0, 1e-60], dtype=object),
    "index": np.array(["a", "a", "b", "b"], dtype=object),
    "trajectory_conversation": np.array([None] * 4),
    "agent": np.array(["main"] * 4, dtype=object),
    "trajectory_id": np.array(["0/0", "0/1", "1/0", "1/1"], dtype=object),
}


@pytest.mark.proof("edges", param="name")
@pytest.mark.parametrize("name", [name for name in GROUPED if "optimal_token_baseline" not in name])
def test_rounding_is_no_difference_between_siblings(name: str):
    advantages, _ = compute_advantages(name, ROUNDED, SETTINGS | {"gamma": 1.0})
    assert (advantages == 0).all()


@pytest.mark.proof("edges", param="name")
@pytest.mark.parametrize("name", [*sorted(set(GROUPED) - OTHER_BASELINES), "reinforce_plus_plus"])
def test_a_response_at_the_mean_is_no_bad_one(name: str):
    scores = (0.7, 0.8, 0.9) if name == "maxrl" else (-0.1, 0.1, 0.3)
    # The means are 0.1 and 0.8; of the float32 numbers they are 1e-9 and 2e-8 away from the middle one.
    batch = random_batch(3, ["a"] * 3, density=1.1)
    batch["token_level_rewards"] = torch.zeros(3, 7)
    batch["token_level_rewards"][:, -1] = tensor(scores)
    batch["accuracy"] = batch["format"] = np.array(scores, dtype=object)
    advantages, _ = compute_advantages(name, batch, SETTINGS | {"gamma": 1.0, "high_level_gamma": 1.0})
    assert (advantages[1] == 0).all()
    assert (advantages[0] < 0).all()
    assert (advantages[2] > 0).all()


@pytest.mark.proof("edges", param="name")
@pytest.mark.parametrize("name", [name for name in NAMES if "index" not in adv_needs(name).columns] + ["gdpo"])
def test_rounding_is_not_scaled_up_by_whitening(name: str):
    rewards = (11.000001, 11.0)  # adjacent numbers of float32
    batch = random_batch(3, ["a", "b"], density=1.1)
    batch["token_level_rewards"] = torch.zeros(2, 7)
    batch["token_level_rewards"][:, -1] = tensor(rewards)
    batch["values"], batch["reward_baselines"] = torch.zeros(2, 7), tensor(rewards).flip(0)
    batch["role_baselines"] = tensor(rewards).flip(0)
    batch["accuracy"] = batch["format"] = np.array(rewards, dtype=object)
    advantages, _ = compute_advantages(name, batch, SETTINGS | {"gamma": 1.0, "lam": 1.0, "high_level_gamma": 1.0})
    assert (advantages == 0).all()


@pytest.mark.proof("edges", param="name")
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_rounding_is_no_difference_at_a_token(name: str):
    batch = {**random_batch(3, ["a"] * 4, 20, 1.1), **ROUNDED}
    advantages, _ = compute_advantages(name, only_rows(batch, [0, 1]), SETTINGS)
    assert (advantages[:, 0] == 0).all()  # both have 14 to go
    assert (advantages[:, 1:-1] != 0).all()


@every
def test_order_of_samples_does_not_matter(name: str):
    batch = random_batch(8)
    order = [3, 0, 5, 1, 4, 2]
    for plain, moved in zip(
        compute_advantages(name, batch, SETTINGS),
        compute_advantages(name, only_rows(batch, order), SETTINGS),
        strict=True,
    ):
        assert_close(moved, plain[order], rtol=1e-5, atol=1e-6)


@every
def test_names_of_groups_do_not_matter(name: str):
    batch = random_batch(8)
    renamed = {**batch, "index": [("z", 1), ("z", 1), ("z", 1), 7, 7, 7]}
    assert_close(compute_advantages(name, renamed, SETTINGS), compute_advantages(name, batch, SETTINGS))


@every
def test_padding_on_the_right_does_not_matter(name: str):
    batch = random_batch(6)
    wider = {
        k: torch.nn.functional.pad(v, (0, 3)) if isinstance(v, torch.Tensor) and v.dim() == 2 else v
        for k, v in batch.items()
    }
    for plain, padded in zip(
        compute_advantages(name, batch, SETTINGS), compute_advantages(name, wider, SETTINGS), strict=True
    ):
        assert_close(padded[:, :7], plain)
        assert (padded[:, 7:] == 0).all()


@every
def test_masks_of_any_dtype(name: str):
    batch = random_batch(6)
    for dtype in (torch.bool, torch.int32, torch.float32):
        found = compute_advantages(name, {**batch, "response_mask": batch["response_mask"].to(dtype)}, SETTINGS)
        assert_close(found, compute_advantages(name, batch, SETTINGS))


@every
def test_rewards_of_any_dtype(name: str):
    batch = random_batch(6)
    batch["token_level_rewards"] = (4 * batch["token_level_rewards"]).round()
    plain, _ = compute_advantages(name, batch, SETTINGS)
    for dtype in (torch.float64, torch.int64):
        found, _ = compute_advantages(
            name, {**batch, "token_level_rewards": batch["token_level_rewards"].to(dtype)}, SETTINGS
        )
        assert found.is_floating_point()
        assert_close(found.float(), plain)


@every
def test_inputs_stay_as_they_are_and_results_are_their_own(name: str):
    batch = random_batch(9)
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value.copy() for key, value in batch.items()}
    advantages, returns = compute_advantages(name, batch, SETTINGS)
    advantages.add_(1.0)
    returns.add_(2.0)
    for key, value in before.items():
        assert (batch[key] == value).all()
    again, _ = compute_advantages(name, batch, SETTINGS)
    assert_close(again + 1.0, advantages)
    assert advantages.dtype == returns.dtype == torch.float32


@every
def test_a_better_response_has_the_larger_advantage(name: str):
    """Fails if a sign is wrong."""
    batch = random_batch(0, ["p", "p"], width=2, density=1.1)
    batch |= {
        "token_level_rewards": tensor([[0.0, 1.0], [0.0, 0.0]]),
        "values": torch.full((2, 2), 0.5),
        "reward_baselines": torch.full((2,), 0.5),
        "role_baselines": torch.full((2,), 0.5),
        "accuracy": np.array([1.0, 0.0], dtype=object),
        "format": np.array([1, 0], dtype=object),
    }
    advantages, _ = compute_advantages(name, batch, SETTINGS)
    assert (advantages[0] > 0).all()
    if name == "grpo_passk":  # tells the best alone
        assert (advantages[1] == 0).all()
    else:
        assert (advantages[1] < 0).all()


@pytest.mark.parametrize("name", sorted(set(GROUPED) - {"gpg", "maxrl", "gdpo"}))
def test_a_constant_added_to_a_group_changes_nothing(name: str):
    # On the last token of full responses, so that it is added to every return.
    batch = random_batch(7, density=1.1)
    shifted = {**batch, "token_level_rewards": batch["token_level_rewards"].clone()}
    shifted["token_level_rewards"][:3, -1] += 5.0
    plain, moved = (compute_advantages(name, b, SETTINGS)[0] for b in (batch, shifted))
    assert_close(plain, moved, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(WHITENED | {"grpo", "grpo_vectorized", "grpo_passk", "grpo_per_turn", "maxrl"}))
def test_the_scale_of_rewards_does_not_matter(name: str):
    batch = random_batch(7, density=1.1)
    scaled = {**batch, "token_level_rewards": 8 * batch["token_level_rewards"], "values": 8 * batch["values"],
              "accuracy": 8 * batch["accuracy"], "format": 8 * batch["format"]}  # fmt: skip
    plain, other = (compute_advantages(name, b, SETTINGS)[0] for b in (batch, scaled))
    assert_close(plain, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(set(GROUPED) - {"gdpo"}))
def test_equal_scores_give_exactly_zero(name: str):
    batch = random_batch(3, [0] * 3 + [1] * 5, density=1.1)
    batch["token_level_rewards"] = torch.zeros(8, 7)
    batch["token_level_rewards"][:, -1] = 0.1
    tolerance = 1e-6 if "token_baseline" in name else 0.0  # its ε keeps the weights from adding up to exactly 1
    assert compute_advantages(name, batch, SETTINGS)[0].abs().max() <= tolerance


@every
def test_metadata_is_complete(name: str):
    needs = adv_needs(name)
    assert needs.paper.startswith("https://")
    assert needs.reproduces
    chosen = [o for overrides in needs.reproduces.values() for o in overrides if o.startswith("algorithm.adv_est")]
    assert chosen
    for override in chosen:
        assert get_adv_estimator_fn(override.partition("=")[2]) is get_adv_estimator_fn(name)
