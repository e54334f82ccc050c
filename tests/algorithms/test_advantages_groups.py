"""Estimators that compare whole responses: numbers by hand, reductions of one to another, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from tests.support.estimators import SETTINGS, random_batch
from verl.algorithms import (
    compute_advantages,
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
    get_adv_estimator_fn,
)
from verl.errors import ConfigError, RewardError, SchemaError
from verl.utils.torch_functional import masked_whiten


def rewards(*values: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per response."""
    return tensor(values).unsqueeze(-1), torch.ones(len(values), 1)


def of(estimator, values: list[float], index: list, **settings) -> list[float]:
    r, mask = rewards(*values)
    advantages, returns = estimator(r, mask, index, **settings)
    assert_close(advantages, returns)
    assert advantages.data_ptr() != returns.data_ptr()
    return advantages.flatten().tolist()


def outcome_batch(seed: int, groups: list[int], full: bool = False) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    batch = random_batch(seed, groups, density=1.1 if full else 0.7)
    return batch["token_level_rewards"], batch["response_mask"], batch["index"]


GROUPS = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]

# ---- other names --------------------------------------------------------------------------------


@pytest.mark.proof("reductions", "grpo_vectorized", "rloo_vectorized")
def test_the_vectorized_names_are_the_same_functions():
    assert get_adv_estimator_fn("grpo_vectorized") is get_adv_estimator_fn("grpo")
    assert get_adv_estimator_fn("rloo_vectorized") is get_adv_estimator_fn("rloo")
    assert compute_grpo_vectorized_outcome_advantage is compute_grpo_outcome_advantage
    assert compute_rloo_vectorized_outcome_advantage is compute_rloo_outcome_advantage


@pytest.mark.proof("reductions", "grpo", "rloo")
def test_rloo_is_grpo_without_std_times_n_over_n_minus_one():
    r, mask, index = outcome_batch(3, [0] * 5 + [1] * 5)
    plain, _ = compute_grpo_outcome_advantage(r, mask, index, norm_adv_by_std_in_grpo=False)
    assert_close(compute_rloo_outcome_advantage(r, mask, index)[0], plain * 5 / 4)


# ---- grpo_passk ---------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "grpo_passk")
def test_passk_by_hand():
    # Group a: 1, 4, 3: best 4, second 3, mean 8/3, squares 25/9 + 16/9 + 1/9 = 42/9, deviation √(21/9)
    # Group b: 2, 2, 0: two best, so each could be missed. Group c: one response, its own reward.
    values, index = [1.0, 4.0, 3.0, 2.0, 2.0, 0.0, 5.0], list("aaabbbc")
    found = of(compute_grpo_passk_outcome_advantage, values, index)
    assert found == pytest.approx([0, 1 / (math.sqrt(21 / 9) + 1e-6), 0, 0, 0, 0, 5 / (1 + 1e-6)])
    found = of(compute_grpo_passk_outcome_advantage, values, index, norm_adv_by_std_in_grpo=False)
    assert found == [0, 1, 0, 0, 0, 0, 5]


@pytest.mark.proof("by hand", "grpo_passk")
def test_passk_of_negative_rewards():
    # The best is -1, the second -4: a masked row's 0 would be better than both.
    found = of(compute_grpo_passk_outcome_advantage, [-4.0, -1.0], ["a", "a"], norm_adv_by_std_in_grpo=False)
    assert found == [0, 3]


@pytest.mark.proof("reductions", "grpo_passk")
def test_passk_of_two_is_what_rloo_gives_the_better():
    r, mask, index = outcome_batch(1, [0, 0, 1, 1, 2, 2])
    found, _ = compute_grpo_passk_outcome_advantage(r, mask, index, norm_adv_by_std_in_grpo=False)
    assert_close(found, compute_rloo_outcome_advantage(r, mask, index)[0].clamp(min=0))


@pytest.mark.proof("reductions", "grpo_passk")
def test_passk_is_what_the_maximum_loses_without_the_response():
    r, mask, index = outcome_batch(2, GROUPS)
    found, _ = compute_grpo_passk_outcome_advantage(r, mask, index, norm_adv_by_std_in_grpo=False)
    totals = (r * mask).sum(-1).tolist()
    for i, group in enumerate(index):
        others = [x for j, x in enumerate(totals) if index[j] == group and j != i]
        if others and mask[i].any():
            assert found[i].max() == pytest.approx(max(*others, totals[i]) - max(others), abs=1e-6)


# ---- reinforce_plus_plus_baseline ---------------------------------------------------------------


@pytest.mark.proof("by hand", "reinforce_plus_plus_baseline")
def test_reinforce_plus_plus_baseline_by_hand():
    # R - mean: a: 1 - 2, 3 - 2; b alone: 4. On tokens: -1, -1 | 1 | 4: mean 3/4, squares
    # (7/4)² + (7/4)² + (1/4)² + (13/4)² = 268/16, variance 268/48
    r, mask = tensor([[0.0, 1.0], [3.0, 0.0], [4.0, 9.0]]), tensor([[1, 1], [1, 0], [1, 0]])
    advantages, returns = compute_reinforce_plus_plus_baseline_outcome_advantage(r, mask, ["a", "a", "b"])
    scale = math.sqrt(268 / 48 + 1e-8)
    assert_close(advantages, tensor([[-1.75, -1.75], [0.25, 0.0], [3.25, 0.0]]) / scale)
    assert_close(returns, advantages)
    assert returns.data_ptr() != advantages.data_ptr()


@pytest.mark.proof("reductions", "reinforce_plus_plus_baseline")
def test_reinforce_plus_plus_baseline_is_whitened_grpo_without_std():
    r, mask, index = outcome_batch(4, GROUPS)
    centred, _ = compute_grpo_outcome_advantage(r, mask, index, norm_adv_by_std_in_grpo=False)
    found, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(r, mask, index)
    assert_close(found, masked_whiten(centred, mask))


# ---- opo ----------------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "opo")
def test_opo_by_hand():
    # Group a: R = 1 of 3 tokens, R = 5 of 1 token: baseline (3·1 + 1·5)/4 = 2. b is alone.
    r = tensor([[0.0, 0.0, 1.0], [5.0, 9.0, 9.0], [7.0, 0.0, 0.0]])
    mask = tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    advantages, _ = compute_opo_outcome_advantage(r, mask, ["a", "a", "b"])
    assert_close(advantages, tensor([[-1.0, -1.0, -1.0], [3.0, 0.0, 0.0], [7.0, 7.0, 0.0]]))


@pytest.mark.proof("reductions", "opo")
def test_opo_of_equal_lengths_is_grpo_without_std():
    r, mask, index = outcome_batch(5, GROUPS, full=True)
    plain = compute_grpo_outcome_advantage(r, mask, index, norm_adv_by_std_in_grpo=False)
    assert_close(compute_opo_outcome_advantage(r, mask, index), plain)


@pytest.mark.proof("reductions", "opo")
def test_opo_sums_to_zero_over_the_tokens_of_a_group():
    r, mask, index = outcome_batch(6, [0] * 4 + [1] * 4)
    advantages, _ = compute_opo_outcome_advantage(r, mask, index)
    assert_close(advantages.view(2, -1).sum(-1), torch.zeros(2), atol=1e-5, rtol=0)


# ---- gpg ----------------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "gpg")
def test_gpg_by_hand():
    # 6 rows, 2 with a reward: α = 3. Group a: 1, 0, 0, 0, mean 1/4. Group b: 0. Group c: 2, alone.
    found = of(compute_gpg_outcome_advantage, [1.0, 0, 0, 0, 0, 2.0], list("aaaabc"))
    assert found == pytest.approx([2.25, -0.75, -0.75, -0.75, 0, 6])
    found = of(compute_gpg_outcome_advantage, [1.0, 0, 0, 0, 0, 2.0], list("aaaabc"), f_norm=3.0)
    assert found == pytest.approx([0.75, -0.25, -0.25, -0.25, 0, 2])


@pytest.mark.proof("edges", "gpg")
def test_gpg_without_any_reward_is_zero():
    assert of(compute_gpg_outcome_advantage, [0.0, 0.0, 0.0], list("aab")) == [0, 0, 0]


@pytest.mark.proof("reductions", "gpg")
def test_gpg_where_every_row_has_a_reward_is_grpo_without_std():
    r, mask, index = outcome_batch(7, GROUPS, full=True)
    plain = compute_grpo_outcome_advantage(r, mask, index, norm_adv_by_std_in_grpo=False)
    assert_close(compute_gpg_outcome_advantage(r, mask, index), plain)


# ---- maxrl --------------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "maxrl")
def test_maxrl_by_hand():
    # Group a: 1 of 4 right, mean 1/4: (1 - 1/4)/(1/4) = 3, (0 - 1/4)/(1/4) = -1. b: never. c: alone.
    found = of(compute_maxrl_outcome_advantage, [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0], list("aaaabbc"))
    assert found == pytest.approx([-1, 3, -1, -1, 0, 0, 1])


@pytest.mark.proof("reductions", "maxrl")
def test_maxrl_is_grpo_without_std_over_the_rate_of_success():
    r, mask = rewards(1, 0, 0, 1, 1, 0)
    index = list("aaabbb")
    plain, _ = compute_grpo_outcome_advantage(r, mask, index, norm_adv_by_std_in_grpo=False)
    rate = tensor([1 / 3] * 3 + [2 / 3] * 3).unsqueeze(-1)
    assert_close(compute_maxrl_outcome_advantage(r, mask, index)[0], plain / rate)


@pytest.mark.proof("edges", "maxrl")
def test_maxrl_refuses_negative_rewards():
    with pytest.raises(RewardError, match=r"row 1 has -1\. Score failure as 0.*without a KL penalty.*grpo"):
        of(compute_maxrl_outcome_advantage, [1.0, -1.0], ["a", "a"])


# ---- gdpo ---------------------------------------------------------------------------------------


@pytest.mark.proof("by hand", "gdpo")
def test_gdpo_by_hand():
    # Components of two siblings: accuracy 0, 1 and format 0, 100: each normalised to ∓1/√2 (ε apart), so that
    # format, a hundred times larger, counts by its weight 1/2 alone: ∓(1 + 1/2)/√2, whitened.
    mask = tensor([[1, 0], [1, 1]])
    advantages, returns = compute_gdpo_outcome_advantage(
        mask, ["p", "p"], ["accuracy", "format"], [1.0, 0.5],
        accuracy=np.array([0, 1], dtype=object), format=np.array([0.0, 100.0], dtype=object),
    )  # fmt: skip
    # On tokens -x, x, x: mean x/3, squares (16 + 4 + 4)/9 x², variance 24/18 x²: -4/3 / √(4/3) = -2/√3, 1/√3
    assert_close(advantages, tensor([[-2.0, 0.0], [1.0, 1.0]]) / math.sqrt(3), rtol=1e-5, atol=0)
    assert_close(returns, advantages)


@pytest.mark.proof("by hand", "gdpo")
def test_gdpo_weighs_components():
    # Opposed components: equal weights leave nothing, unequal ones the sign of the heavier.
    one = {"accuracy": [0, 1], "format": [1, 0]}
    arguments = (torch.ones(2, 1), ["p", "p"], ["accuracy", "format"])
    assert (compute_gdpo_outcome_advantage(*arguments, **one)[0] == 0).all()
    heavier, _ = compute_gdpo_outcome_advantage(*arguments, [1.0, 3.0], **one)
    assert_close(heavier.flatten(), tensor([1.0, -1.0]) / math.sqrt(2), rtol=1e-5, atol=0)


@pytest.mark.proof("reductions", "gdpo")
@pytest.mark.parametrize("by_std", [True, False])
def test_gdpo_of_one_component_is_whitened_grpo(by_std: bool):
    r, mask, index = outcome_batch(8, GROUPS)
    plain, _ = compute_grpo_outcome_advantage(r, mask, index, norm_adv_by_std_in_grpo=by_std)
    total = np.array((r * mask).sum(-1).tolist(), dtype=object)
    found, _ = compute_gdpo_outcome_advantage(
        mask, index, ["score"], norm_adv_by_std_in_grpo=by_std, score=total, other=None
    )
    assert_close(found, masked_whiten(plain, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [list, np.array, tensor])
def test_gdpo_reads_components_of_any_kind(kind):
    found, _ = compute_gdpo_outcome_advantage(torch.ones(2, 1), ["p", "p"], ["ok"], ok=kind([False, True]))
    assert found[0] < 0
    assert found[1] > 0


@pytest.mark.proof("edges", "gdpo")
def test_gdpo_says_what_it_lacks():
    mask, index = torch.ones(2, 1), ["p", "p"]
    with pytest.raises(ConfigError, match=r"gdpo_reward_keys names none.*Name keys of the dict"):
        compute_gdpo_outcome_advantage(mask, index)
    with pytest.raises(ConfigError, match=r"gdpo_reward_weights has 1 numbers for the 2 components a, b"):
        compute_gdpo_outcome_advantage(mask, index, ["a", "b"], [1.0], a=[0, 1], b=[0, 1])
    with pytest.raises(SchemaError, match=r"needs column 'acuracy'.*has: accuracy.*Did you mean 'accuracy'"):
        compute_gdpo_outcome_advantage(mask, index, ["acuracy"], accuracy=[0, 1])
    for bad in (None, "fine", math.nan, math.inf):
        with pytest.raises(SchemaError, match=r"component 'a'.*in row 1; it should be a finite number"):
            compute_gdpo_outcome_advantage(mask, index, ["a"], a=np.array([0, bad], dtype=object))


def test_gdpo_by_its_name_reads_settings_and_columns():
    batch = random_batch(0)
    both, _ = compute_advantages("gdpo", batch, SETTINGS)
    one, _ = compute_advantages("gdpo", batch, {"gdpo_reward_keys": ("format",), "gdpo_reward_weights": None})
    expected, _ = compute_gdpo_outcome_advantage(
        batch["response_mask"], batch["index"], ["format"], format=batch["format"]
    )
    assert_close(one, expected)
    assert not torch.equal(both, one)
